// Streams, events and graphs. Streams are numbers, and what is launched runs at once, in the thread that launches it. If a
// stream is being captured, nothing runs: it is recorded, and runs whenever the graph is launched. A launch starts the
// last recorded operation whose dependencies are done, so that a missing one shows in the results.
//
// Captures fail as CUDA's do: on a host that waits or reads, on calls that the capture's mode forbids, on events from
// outside, and on streams that were not joined.

#include "streams.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <queue>
#include <set>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Nodes = std::set<size_t>;  // indices in a graph
struct Node { std::function<int()> work; Nodes after; };
struct Graph { std::vector<Node> nodes; };

struct Capture {
    unsigned long long id;
    cudaStreamCaptureMode mode;
    std::thread::id thread;
    Graph* graph;
    bool spoiled;
    std::map<cudaStream_t, Nodes> last;  // by stream, what its next node runs after
};

struct Event {
    std::chrono::steady_clock::time_point time;
    unsigned long long capture;  // or 0
    Nodes after;
};

std::recursive_mutex lock;
using Guard = std::lock_guard<std::recursive_mutex>;
std::map<cudaStream_t, Capture*> captures;  // by each stream that takes part
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

Event* event_of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

Capture* capture_of(cudaStream_t stream) {
    auto found = captures.find(stream);
    return found == captures.end() ? nullptr : found->second;
}

cudaError_t spoil(Capture* capture, cudaError_t error) {
    capture->spoiled = true;
    return error;
}

// A wait of the host for a stream or an event of this capture, which may be null.
cudaError_t host_waits(Capture* capture, cudaError_t error) {
    return capture ? spoil(capture, error) : cudaError_t(unsafe_call());
}

cudaError_t query(cudaEvent_t event) {
    Guard guard(lock);
    for (auto& [stream, capture] : captures)
        if (capture->id == event_of(event)->capture) return host_waits(capture, cudaErrorCapturedEvent);
    return host_waits(nullptr, cudaSuccess);
}

cudaError_t make_stream(cudaStream_t* stream) {
    static std::atomic<size_t> last{0x1000};
    *stream = reinterpret_cast<cudaStream_t>(last += 16);
    return cudaSuccess;
}

}  // namespace

int launched(void* stream, std::function<int()> work) {
    {
        Guard guard(lock);
        if (Capture* c = capture_of(static_cast<cudaStream_t>(stream))) {
            Nodes& after = c->last[static_cast<cudaStream_t>(stream)];
            c->graph->nodes.push_back({work, after});
            after = {c->graph->nodes.size() - 1};
            return 0;
        }
    }
    return work();
}

int unsafe_call() {
    Guard guard(lock);
    if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
    for (auto& [stream, c] : captures) {
        bool own = c->thread == std::this_thread::get_id() && c->mode != cudaStreamCaptureModeRelaxed;
        bool any = c->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
        if (own || any) return spoil(c, cudaErrorStreamCaptureUnsupported);
    }
    return cudaSuccess;
}

// Records or runs a call of Python (site/emulate.py).
EXPORT int softgpu_launch(void* stream, int (*call)(long), long number) {
    return launched(stream, [=] { return call(number); });
}

// Captures.

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    static unsigned long long last = 0;
    Guard guard(lock);
    if (!stream) return cudaErrorStreamCaptureUnsupported;  // the legacy stream
    if (capture_of(stream)) return cudaErrorIllegalState;
    captures[stream] = new Capture{++last, mode, std::this_thread::get_id(), new Graph, false, {{stream, {}}}};
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    Guard guard(lock);
    *graph = nullptr;
    Capture* c = capture_of(stream);
    if (!c) return cudaErrorIllegalState;
    if (c->thread != std::this_thread::get_id() && c->mode != cudaStreamCaptureModeRelaxed)
        return spoil(c, cudaErrorStreamCaptureWrongThread);
    Nodes joined, left = c->last[stream];
    while (!left.empty()) {
        size_t node = *left.begin();
        left.erase(left.begin());
        if (!joined.insert(node).second) continue;
        left.insert(c->graph->nodes[node].after.begin(), c->graph->nodes[node].after.end());
    }
    for (auto& [other, _] : c->last) captures.erase(other);
    if (c->spoiled) return cudaErrorStreamCaptureInvalidated;
    if (joined.size() < c->graph->nodes.size()) return cudaErrorStreamCaptureUnjoined;
    *graph = reinterpret_cast<cudaGraph_t>(c->graph);
    delete c;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                            cudaGraph_t* graph, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                            size_t*) {
    Guard guard(lock);
    Capture* c = capture_of(stream);
    *status = !c           ? cudaStreamCaptureStatusNone
              : c->spoiled ? cudaStreamCaptureStatusInvalidated
                           : cudaStreamCaptureStatusActive;
    if (id) *id = c ? c->id : 0;
    if (graph) *graph = c ? reinterpret_cast<cudaGraph_t>(c->graph) : nullptr;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    std::swap(thread_mode, *mode);
    return cudaSuccess;
}

// Graphs. An executable graph is the graph's copy.

EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
    *made = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
    *count = reinterpret_cast<Graph*>(graph)->nodes.size();
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete reinterpret_cast<Graph*>(graph);
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    delete reinterpret_cast<Graph*>(graph);
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    const auto& nodes = reinterpret_cast<Graph*>(graph)->nodes;
    return cudaError_t(launched(stream, [&nodes] {
        std::vector<std::vector<size_t>> before(nodes.size());
        std::vector<size_t> waits(nodes.size());
        std::priority_queue<size_t> ready;
        for (size_t node = 0; node < nodes.size(); node++) {
            for (size_t other : nodes[node].after) before[other].push_back(node);
            if (!(waits[node] = nodes[node].after.size())) ready.push(node);
        }
        while (!ready.empty()) {
            size_t node = ready.top();
            ready.pop();
            if (int error = nodes[node].work()) return error;
            for (size_t next : before[node])
                if (!--waits[next]) ready.push(next);
        }
        return 0;
    }));
}

// Streams.

EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) { return make_stream(stream); }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return make_stream(stream); }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { *priority = 0; return cudaSuccess; }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    Guard guard(lock);
    return host_waits(capture_of(stream), cudaErrorStreamCaptureUnsupported);
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaStreamSynchronize(stream); }
EXPORT cudaError_t cudaDeviceSynchronize() { return cudaError_t(unsafe_call()); }
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    Guard guard(lock);
    Event* e = event_of(event);
    Capture *own = capture_of(stream), *other = nullptr;
    for (auto& [_, capture] : captures)
        if (capture->id == e->capture) other = capture;
    if (own && own != other) return spoil(own, cudaErrorStreamCaptureIsolation);
    if (!other) return cudaSuccess;
    if (!stream) return spoil(other, cudaErrorStreamCaptureImplicit);
    captures[stream] = other;
    other->last[stream].insert(e->after.begin(), e->after.end());
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) {
    if (capture_of(stream)) return spoil(capture_of(stream), cudaErrorStreamCaptureUnsupported);
    call(stream, cudaSuccess, data);
    return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* data) {
    return cudaError_t(launched(stream, [=] { call(data); return 0; }));
}

// Events: whatever was launched is done.

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = reinterpret_cast<cudaEvent_t>(new Event{});
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    Guard guard(lock);
    Capture* c = capture_of(stream);
    *event_of(event) = {std::chrono::steady_clock::now(), c ? c->id : 0, c ? c->last[stream] : Nodes{}};
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) { return query(event); }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) { return query(event); }
EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begun, cudaEvent_t end) {
    *ms = std::chrono::duration<float, std::milli>(event_of(end)->time - event_of(begun)->time).count();
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) { delete event_of(event); return cudaSuccess; }
EXPORT const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {  // as CUDA says it
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
        case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
        case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
        case cudaErrorStreamCaptureImplicit:
            return "operation would make the legacy stream depend on a capturing blocking stream";
        case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
        default: return "an error of the software GPU";
    }
}
