// NCCL between processes of one machine, through shared memory. Every call runs to its end in the thread that makes it, or
// in the one that launches the graph; real NCCL runs it later, on a stream. So orders of calls that may deadlock on GPUs do so here, and there are no races
// between streams.
//
//   SOFTGPU_DIR   folder of this launch. Every communicator has a file, `ID`, that its processes map; every process has
//                 a log, `calls.PID`, a line per call: communicator, rank, size, call, elements, dtype, peer or root

#include "streams.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

struct ncclUniqueId { uint64_t words[16]; };

namespace {

// nccl.h needs headers that the wheels of torch do not bring. Results, dtypes and operations have its numbers.
enum Result { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_USAGE = 5 };
enum Dtype { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 };
enum Operation { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE };

constexpr int RANKS = 64;
constexpr size_t SLOT = 256ul << 20;  // bytes of an operand or a message. Files are sparse: what is used takes memory

struct Shared {
    std::atomic<long> arrived[RANKS];                              // barriers that each rank has reached
    std::atomic<long> sent[RANKS][RANKS], received[RANKS][RANKS];  // messages [from][to]
};

struct Communicator {
    uint64_t id;
    int rank, size;
    std::atomic<bool> aborted;
    long barriers, splits;
    Shared* shared;
    char* slot(int of) const { return reinterpret_cast<char*>(shared + 1) + SLOT * of; }
    char* box(int from, int to) const { return slot(size + from * size + to); }
};

size_t bytes_of(int dtype) {
    switch (dtype) {
        case INT8: case UINT8: return 1;
        case FLOAT16: case BFLOAT16: return 2;
        case INT32: case UINT32: case FLOAT32: return 4;
        default: return 8;
    }
}

int complain(const char* what) {
    std::fprintf(stderr, "software GPU: NCCL: %s (process %d)\n", what, getpid());
    return INVALID_USAGE;
}

void record(const Communicator* c, const char* call, size_t count = 0, int dtype = -1, int peer = -1) {
    static std::mutex lock;
    static FILE* log = [] {
        const char* folder = std::getenv("SOFTGPU_DIR");
        return folder ? std::fopen((std::string(folder) + "/calls." + std::to_string(getpid())).c_str(), "a") : nullptr;
    }();
    if (!log) return;
    std::lock_guard<std::mutex> guard(lock);
    std::fprintf(log, "%lx %d %d %s %zu %d %d\n", c->id, c->rank, c->size, call, count, dtype, peer);
    std::fflush(log);  // a process may be killed at any time
}

// Waits until `done` or an abort, which another thread may call. Says once what it waits for if that takes long.
template <class Condition>
void wait_until(const Communicator* c, const char* what, Condition done) {
    auto begun = std::chrono::steady_clock::now();
    for (long turn = 1; !done() && !c->aborted; turn++) {
        turn < 200 ? (void)sched_yield() : (void)usleep(50);
        if (turn % 1000 == 0 && std::chrono::steady_clock::now() - begun > std::chrono::seconds(60)) {
            std::fprintf(stderr, "software GPU: process %d, rank %d of %d of communicator %lx, waits in %s\n", getpid(),
                         c->rank, c->size, c->id, what);
            begun += std::chrono::hours(24);
        }
    }
}

void barrier(Communicator* c, const char* what) {
    long turn = ++c->barriers;
    c->shared->arrived[c->rank] = turn;
    for (int rank = 0; rank < c->size; rank++)
        wait_until(c, what, [&] { return c->shared->arrived[rank] >= turn; });
}

// Shows each rank's operand to all: `combine` reads the slots, between two barriers.
template <class Combine>
int collective(Communicator* c, const char* call, const void* operand, size_t bytes, Combine combine) {
    if (bytes > SLOT) return complain("an operand is larger than a slot");
    if (operand) std::memcpy(c->slot(c->rank), operand, bytes);
    barrier(c, call);
    int result = c->aborted ? int(SUCCESS) : combine();
    barrier(c, call);
    return result;
}

template <class T>
T combined(T a, T b, int operation) {
    return operation == MAXIMUM ? std::max(a, b) : operation == MINIMUM ? std::min(a, b) : T(a + b);
}

struct Bfloat16 {
    uint16_t bits;
    operator float() const {
        uint32_t wide = uint32_t(bits) << 16;
        float value;
        std::memcpy(&value, &wide, 4);
        return value;
    }
    explicit Bfloat16(float value) {
        uint32_t wide;
        std::memcpy(&wide, &value, 4);
        bits = std::isnan(value) ? 0x7fc0 : uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);  // to nearest even
    }
};

// Elements of all slots, from `offset` bytes on, in the order of ranks and rounded once.
template <class T, class Wide = T>
int reduce(const Communicator* c, void* result, size_t offset, size_t count, int operation) {
    for (size_t i = 0; i < count; i++) {
        Wide total = reinterpret_cast<T*>(c->slot(0) + offset)[i];
        for (int rank = 1; rank < c->size; rank++)
            total = combined<Wide>(total, reinterpret_cast<T*>(c->slot(rank) + offset)[i], operation);
        static_cast<T*>(result)[i] = T(operation == AVERAGE ? total / Wide(c->size) : total);
    }
    return SUCCESS;
}

int reduce(const Communicator* c, void* result, size_t offset, size_t count, int dtype, int operation) {
    if (operation == PRODUCT || operation > AVERAGE) return complain("an operation that it does not have");
    switch (dtype) {
        case INT8: return reduce<int8_t>(c, result, offset, count, operation);
        case UINT8: return reduce<uint8_t>(c, result, offset, count, operation);
        case INT32: return reduce<int32_t>(c, result, offset, count, operation);
        case INT64: return reduce<int64_t>(c, result, offset, count, operation);
        case FLOAT32: return reduce<float>(c, result, offset, count, operation);
        case FLOAT64: return reduce<double>(c, result, offset, count, operation);
        case BFLOAT16: return reduce<Bfloat16, float>(c, result, offset, count, operation);
        default: return complain("a dtype that it does not have");
    }
}

// Messages. A box holds one, so a send waits until the one before it was received.
struct Message { bool sends; void* data; size_t bytes; int peer; Communicator* c; void* stream; };
thread_local int open_groups = 0;
thread_local std::vector<Message> grouped;

// Copies a message in or out of its box if that is possible now.
bool passes(const Message& m) {
    Communicator* c = m.c;
    int from = m.sends ? c->rank : m.peer, to = m.sends ? m.peer : c->rank;
    auto &sent = c->shared->sent[from][to], &received = c->shared->received[from][to];
    if ((sent == received) != m.sends) return false;
    m.sends ? std::memcpy(c->box(from, to), m.data, m.bytes) : std::memcpy(m.data, c->box(from, to), m.bytes);
    (m.sends ? sent : received)++;
    return true;
}

// All messages of a group in any order, but for those between the same two processes.
int exchange(std::vector<Message> left) {
    while (!left.empty()) {
        wait_until(left.front().c, "a message", [&] {
            std::vector<Message> kept;
            std::map<std::pair<Communicator*, int>, bool> behind;  // by communicator and direction and peer
            for (const Message& m : left) {
                bool& waits = behind[{m.c, m.sends ? m.peer : m.peer + RANKS}];
                if (!m.c->aborted && (waits || !passes(m))) waits = true, kept.push_back(m);
            }
            bool moved = kept.size() < left.size();
            left.swap(kept);
            return moved;
        });
        if (!left.empty() && left.front().c->aborted) break;
    }
    return SUCCESS;
}

int launch_messages() {
    std::vector<Message> all;
    all.swap(grouped);
    return all.empty() ? int(SUCCESS) : launched(all.front().stream, [=] { return exchange(all); });
}

int message(Message m, size_t count, int dtype) {
    record(m.c, m.sends ? "send" : "recv", count, dtype, m.peer);
    if (m.bytes > SLOT) return complain("a message is larger than a slot");
    grouped.push_back(m);
    return open_groups ? int(SUCCESS) : launch_messages();
}

int make(Communicator** result, int size, uint64_t id, int rank) {
    auto* c = new Communicator{id, rank, size, {false}, 0, 0, nullptr};
    *result = c;
    const char* folder = std::getenv("SOFTGPU_DIR");
    if (!folder && size > 1) return complain("SOFTGPU_DIR is not set");
    char path[512] = "/dev/zero";
    if (size > 1) std::snprintf(path, sizeof path, "%s/%lx", folder, c->id);
    int file = open(path, O_CREAT | O_RDWR, 0600);
    size_t bytes = sizeof(Shared) + SLOT * size * (size + 1);
    if (file < 0 || (size > 1 && ftruncate(file, bytes))) return SYSTEM_ERROR;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    if (memory == MAP_FAILED) return SYSTEM_ERROR;
    c->shared = static_cast<Shared*>(memory);
    record(c, "init");
    barrier(c, "its creation");
    return SUCCESS;
}

}  // namespace

EXPORT int ncclGetVersion(int* version) { *version = 22907; return SUCCESS; }
EXPORT const char* ncclGetErrorString(int) { return "an error of the software GPU's NCCL"; }
EXPORT const char* ncclGetLastError(Communicator*) { return ""; }
EXPORT int ncclGetUniqueId(ncclUniqueId* id) {
    FILE* random = std::fopen("/dev/urandom", "r");
    size_t count = std::fread(id, sizeof *id, 1, random);
    std::fclose(random);
    return count == 1 ? SUCCESS : SYSTEM_ERROR;
}
EXPORT int ncclCommInitRank(Communicator** c, int size, ncclUniqueId id, int rank) {
    return make(c, size, id.words[0], rank);
}
EXPORT int ncclCommInitRankConfig(Communicator** c, int size, ncclUniqueId id, int rank, void*) {
    return make(c, size, id.words[0], rank);
}
EXPORT int ncclCommInitRankScalable(Communicator** c, int size, int rank, int, ncclUniqueId* ids, void*) {
    return make(c, size, ids[0].words[0], rank);
}
EXPORT int ncclCommSplit(Communicator* c, int color, int key, Communicator** part, void*) {
    record(c, "split");
    int own[2] = {color, key}, rank = 0, size = 0;
    collective(c, "a split", own, sizeof own, [&] {
        for (int other = 0; other < c->size; other++) {
            const int* theirs = reinterpret_cast<int*>(c->slot(other));
            if (theirs[0] != color) continue;
            size++;
            rank += theirs[1] < key || (theirs[1] == key && other < c->rank);
        }
        return SUCCESS;
    });
    uint64_t id = c->id + 0x9e3779b97f4a7c15 * (++c->splits * 1000 + color);  // the same on its members only
    *part = nullptr;
    return color < 0 ? SUCCESS : make(part, size, id, rank);
}
EXPORT int ncclCommAbort(Communicator* c) { record(c, "abort"); c->aborted = true; return SUCCESS; }
EXPORT int ncclCommDestroy(Communicator* c) {
    record(c, "destroy");
    munmap(c->shared, sizeof(Shared) + SLOT * c->size * (c->size + 1));
    delete c;
    return SUCCESS;
}
EXPORT int ncclCommFinalize(Communicator*) { return SUCCESS; }
EXPORT int ncclCommGetAsyncError(Communicator*, int* result) { *result = SUCCESS; return SUCCESS; }
EXPORT int ncclCommCount(Communicator* c, int* size) { *size = c->size; return SUCCESS; }
EXPORT int ncclCommUserRank(Communicator* c, int* rank) { *rank = c->rank; return SUCCESS; }
EXPORT int ncclCommRegister(Communicator*, void*, size_t, void** handle) { *handle = handle; return SUCCESS; }
EXPORT int ncclCommDeregister(Communicator*, void*) { return SUCCESS; }
EXPORT int ncclRedOpCreatePreMulSum(int*, void*, int, int, Communicator*) { return complain("scaled sums"); }
EXPORT int ncclRedOpDestroy(int, Communicator*) { return SUCCESS; }

EXPORT int ncclGroupStart() { open_groups++; return SUCCESS; }
EXPORT int ncclGroupEnd() {
    return --open_groups ? int(SUCCESS) : launch_messages();
}
EXPORT int ncclSend(const void* data, size_t count, int dtype, int peer, Communicator* c, void* stream) {
    return message({true, const_cast<void*>(data), count * bytes_of(dtype), peer, c, stream}, count, dtype);
}
EXPORT int ncclRecv(void* data, size_t count, int dtype, int peer, Communicator* c, void* stream) {
    return message({false, data, count * bytes_of(dtype), peer, c, stream}, count, dtype);
}
EXPORT int ncclAllReduce(const void* in, void* out, size_t count, int dtype, int operation, Communicator* c,
                         void* stream) {
    return launched(stream, [=] {
        record(c, operation == SUM ? "all-reduce" : "all-reduce-other", count, dtype);
        return collective(c, "all-reduce", in, count * bytes_of(dtype),
                          [&] { return reduce(c, out, 0, count, dtype, operation); });
    });
}
EXPORT int ncclReduceScatter(const void* in, void* out, size_t count, int dtype, int operation, Communicator* c,
                             void* stream) {
    return launched(stream, [=] {
        record(c, operation == SUM ? "reduce-scatter" : "reduce-scatter-other", count, dtype);
        size_t bytes = count * bytes_of(dtype);
        return collective(c, "reduce-scatter", in, bytes * c->size,
                          [&] { return reduce(c, out, bytes * c->rank, count, dtype, operation); });
    });
}
EXPORT int ncclReduce(const void* in, void* out, size_t count, int dtype, int operation, int root, Communicator* c,
                      void* stream) {
    return launched(stream, [=] {
        record(c, "reduce", count, dtype, root);
        return collective(c, "reduce", in, count * bytes_of(dtype),
                          [&] { return c->rank == root ? reduce(c, out, 0, count, dtype, operation) : SUCCESS; });
    });
}
EXPORT int ncclAllGather(const void* in, void* out, size_t count, int dtype, Communicator* c, void* stream) {
    return launched(stream, [=] {
        record(c, "all-gather", count, dtype);
        size_t bytes = count * bytes_of(dtype);
        return collective(c, "all-gather", in, bytes, [&] {
            for (int rank = 0; rank < c->size; rank++)
                std::memcpy(static_cast<char*>(out) + bytes * rank, c->slot(rank), bytes);
            return SUCCESS;
        });
    });
}
EXPORT int ncclAlltoAll(const void* in, void* out, size_t count, int dtype, Communicator* c, void* stream) {
    return launched(stream, [=] {
        record(c, "all-to-all", count, dtype);
        size_t bytes = count * bytes_of(dtype);
        return collective(c, "all-to-all", in, bytes * c->size, [&] {
            for (int rank = 0; rank < c->size; rank++)
                std::memcpy(static_cast<char*>(out) + bytes * rank, c->slot(rank) + bytes * c->rank, bytes);
            return SUCCESS;
        });
    });
}
EXPORT int ncclBroadcast(const void* in, void* out, size_t count, int dtype, int root, Communicator* c, void* stream) {
    return launched(stream, [=] {
        record(c, "broadcast", count, dtype, root);
        size_t bytes = count * bytes_of(dtype);
        return collective(c, "broadcast", c->rank == root ? in : nullptr, bytes,
                          [&] { return std::memcpy(out, c->slot(root), bytes) ? SUCCESS : SYSTEM_ERROR; });
    });
}
EXPORT int ncclBcast(void* data, size_t count, int dtype, int root, Communicator* c, void* stream) {
    return ncclBroadcast(data, data, count, dtype, root, c, stream);
}
