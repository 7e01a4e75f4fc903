// Counters of launches against a driver that only keeps books; ends with a message at the first difference.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>

#include "cuda/counters.h"

using namespace moeflex::cuda;

namespace {

#define EXPECT(condition)                                                 \
    if (!(condition)) {                                                   \
        std::printf("line %d: %s does not hold\n", __LINE__, #condition); \
        std::exit(1);                                                     \
    }

struct Captured {
    uint64_t id = 0;  // 0: the stream is not captured
    void* object = nullptr;
    void (*destroy)(void*) = nullptr;
};
Captured captured;
int capture_mode = 0;  // that of the thread; relaxed where memory is taken
size_t num_allocations = 0;

int get_capture(Stream, int* status, uint64_t* id, Graph* graph, const void**, size_t*) {
    *status = captured.id ? kCaptureActive : 0;
    *id = captured.id;
    *graph = captured.id ? (Graph)&captured : nullptr;
    return 0;
}
int exchange(int* mode) {
    std::swap(*mode, capture_mode);
    return 0;
}
int allocate(DeviceAddress* address, size_t bytes) {
    EXPECT(capture_mode == kCaptureRelaxed);
    ++num_allocations;
    *address = (DeviceAddress)std::calloc(bytes, 1);
    std::memset((void*)*address, 0xff, bytes);
    return 0;
}
int zero(DeviceAddress address, unsigned char value, size_t bytes, Stream) {
    std::memset((void*)address, value, bytes);
    return 0;
}
int make_object(UserObject* object, void* loan, void (*destroy)(void*), unsigned, unsigned) {
    *object = loan;
    captured.destroy = destroy;
    return 0;
}
int retain(Graph, UserObject object, unsigned, unsigned) {
    captured.object = object;
    return 0;
}
int ok_stream(Stream*, unsigned) {
    return 0;
}
int ok(Stream) {
    return 0;
}

bool is_zero(const int* piece, size_t bytes) {
    for (size_t i = 0; i < bytes / 4; ++i)
        if (piece[i]) return false;
    return true;
}

}  // namespace

int main() {
    Driver driver;
    driver.cuStreamGetCaptureInfo_v2 = get_capture;
    driver.cuThreadExchangeStreamCaptureMode = exchange;
    driver.cuMemAlloc_v2 = allocate;
    driver.cuMemsetD8Async = zero;
    driver.cuStreamCreate = ok_stream;
    driver.cuStreamSynchronize = ok;
    driver.cuStreamDestroy_v2 = ok;
    driver.cuUserObjectCreate = make_object;
    driver.cuGraphRetainUserObject = retain;
    Counters counters;
    Stream one = (Stream)1, two = (Stream)2;

    int* first = counters.of(driver, one, 5000);
    EXPECT(is_zero(first, 5000));
    EXPECT(counters.of(driver, one, 16000) == first);  // launches of a stream share
    EXPECT(counters.of(driver, two, 5000) != first);   // streams do not
    int* larger = counters.of(driver, one, 100000);
    EXPECT(larger != first && is_zero(larger, 100000));
    EXPECT(counters.of(driver, one, 5000) == larger);
    EXPECT(counters.of(driver, (Stream)3, 5000) !=
           first);  // a launch may still use the smaller one
    EXPECT(capture_mode == 0);

    // Captures have pieces of their own, also of the same stream, and give them back.
    captured.id = 7;
    int* in_graph = counters.of(driver, one, 5000);
    EXPECT(in_graph != larger && in_graph != first);
    EXPECT(counters.of(driver, one, 5000) == in_graph);
    EXPECT(captured.object != nullptr);
    const Captured graph = captured;
    captured = {8, nullptr, nullptr};
    int* in_other = counters.of(driver, one, 5000);
    EXPECT(in_other != in_graph);
    graph.destroy(graph.object);
    captured = {9, nullptr, nullptr};
    EXPECT(counters.of(driver, one, 5000) == in_graph);
    captured = {};
    EXPECT(counters.of(driver, one, 5000) == larger);

    // A thousand graphs, one after the other, need no more memory than one.
    const size_t before = num_allocations;
    for (uint64_t id = 10; id < 1010; ++id) {
        captured = {id, nullptr, nullptr};
        counters.of(driver, two, 5000);
        captured.destroy(captured.object);
    }
    EXPECT(num_allocations == before);

    // All at once they lie apart.
    std::set<int*> apart;
    for (uint64_t id = 2000; id < 2500; ++id) {
        captured = {id, nullptr, nullptr};
        apart.insert(counters.of(driver, two, 5000));
    }
    EXPECT(apart.size() == 500);
    std::puts("ok");
}
