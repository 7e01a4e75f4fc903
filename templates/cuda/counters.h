// Counters of running launches: small pieces of device memory that are zero whenever no launch uses them.
//
// Launches on one stream run one after the other and share a piece. Launches of a CUDA graph may run at any time after
// the capture, so that every capture has pieces of its own, and gives them back when its graph is destroyed.
#pragma once
#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "driver.h"

namespace moeflex {
namespace cuda {

class Counters {
  public:
    // Where the counters of a launch on `stream` lie: `bytes` zeroed bytes. The device's context is current.
    int* of(const Driver& driver, Stream stream, size_t bytes) {
        int status = 0;
        uint64_t capture = 0;
        Graph graph = nullptr;
        driver.check(
            driver.cuStreamGetCaptureInfo_v2(stream, &status, &capture, &graph, nullptr, nullptr),
            "asking whether the stream is captured");
        if (status != kCaptureActive) capture = 0, graph = nullptr;
        std::lock_guard<std::mutex> guard(*mutex_);
        Piece& piece = in_use_[{stream, capture}];
        // A launch that still runs may use the smaller piece: it is not handed out again.
        if (piece.bytes < bytes) {
            piece = take(driver, bytes);
            if (graph) retain(driver, graph, {stream, capture}, piece);
        }
        return (int*)piece.address;
    }

  private:
    struct Piece {
        DeviceAddress address = 0;
        size_t bytes = 0;
    };
    using Owner = std::pair<Stream, uint64_t>;
    struct Loan {
        Counters* counters;
        Owner owner;
        Piece piece;
    };
    static constexpr size_t kSmallest = 16 << 10, kSlab = 2 << 20;

    Piece take(const Driver& driver, size_t bytes) {
        size_t size = kSmallest;
        while (size < bytes) size *= 2;
        auto& free = free_[size];
        if (free.empty()) {
            const size_t total = std::max(size, kSlab);
            const DeviceAddress slab = zeroed(driver, total);
            for (size_t at = 0; at + size <= total; at += size) free.push_back({slab + at, size});
        }
        const Piece piece = free.back();
        free.pop_back();
        return piece;
    }

    static DeviceAddress zeroed(const Driver& driver, size_t bytes) {
        RelaxedCapture relaxed(driver);
        DeviceAddress address = 0;
        driver.check(driver.cuMemAlloc_v2(&address, bytes), "allocating counters");
        Stream stream = nullptr;
        driver.check(driver.cuStreamCreate(&stream, kNonBlocking), "cuStreamCreate");
        driver.check(driver.cuMemsetD8Async(address, 0, bytes, stream), "zeroing counters");
        driver.check(driver.cuStreamSynchronize(stream), "zeroing counters");
        driver.check(driver.cuStreamDestroy_v2(stream), "cuStreamDestroy");
        return address;
    }

    // The graph holds the piece; the driver calls back when nothing of the graph is left.
    void retain(const Driver& driver, Graph graph, const Owner& owner, const Piece& piece) {
        auto loan = std::make_unique<Loan>(Loan{this, owner, piece});
        UserObject object = nullptr;
        driver.check(
            driver.cuUserObjectCreate(&object, loan.get(), give_back, 1, kNoDestructorSync),
            "cuUserObjectCreate");
        driver.check(driver.cuGraphRetainUserObject(graph, object, 1, kMoveReference),
                     "cuGraphRetainUserObject");
        loan.release();
    }

    static void give_back(void* object) {
        const std::unique_ptr<Loan> loan((Loan*)object);
        Counters& counters = *loan->counters;
        std::lock_guard<std::mutex> guard(*counters.mutex_);
        counters.free_[loan->piece.bytes].push_back(loan->piece);
        const auto found = counters.in_use_.find(loan->owner);
        if (found != counters.in_use_.end() && found->second.address == loan->piece.address)
            counters.in_use_.erase(found);
    }

    std::unique_ptr<std::mutex> mutex_ = std::make_unique<std::mutex>();
    std::map<Owner, Piece> in_use_;
    std::map<size_t, std::vector<Piece>> free_;
};

}  // namespace cuda
}  // namespace moeflex
