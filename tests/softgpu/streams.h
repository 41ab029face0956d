// What runs on streams, for the other files.

#include <functional>

// Runs `work` now, or records it if the stream is being captured.
int launched(void* stream, std::function<int()> work);

// The error of a call that a capture forbids (cudaStreamCaptureMode), which also spoils the capture; or 0.
int unsafe_call();
