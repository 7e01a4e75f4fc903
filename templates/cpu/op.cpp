// moeflex::moe_layer on CPU tensors: looks the plan up in a table of kernels and calls the one that fits the dtypes.
//
// Built once a torch version through the C part of the stable ABI; kernels are libraries of their own, registered by
// `moeflex_register`. Needs no Python at run time.
#include <pthread.h>

#include <cerrno>
#include <cstring>
#include <new>

#include "op_arguments.h"

using namespace moeflex;

namespace {

// ---- threads ---------------------------------------------------------------------------------------
// A forked child has torch's thread pool in name only: it computes alone.
bool in_forked_child = false;

struct Team {
    MoeflexBody body;
    void* context;
};
void run_share(int64_t begin, int64_t end, void* team) {
    for (int64_t i = begin; i < end; ++i) ((Team*)team)->body((int)i, ((Team*)team)->context);
}
void parallel(int num_workers, MoeflexBody body, void* context) {
    Team team{body, context};
    if (num_workers <= 1 || in_forked_child)
        run_share(0, num_workers, &team);
    else
        torch_parallel_for(0, num_workers, 1, run_share, &team);
}

KernelTable<MoeflexKernel>& table() {
    static auto* one = new KernelTable<MoeflexKernel>;
    return *one;
}

AtenTensorHandle compute(const Handle& x, const std::vector<Handle>& router,
                         const std::vector<Handle>& tensors, const std::string& plan) {
    std::unique_ptr<Experts> experts;
    const auto* entry = table().find(plan, float_code(x.view().dtype), tensors,
                                     "moe_compiler.runtime.cpu_target.prepare", experts);
    LayerCall call(x, router, *experts, entry->spec, entry->spec.top_k);
    call.args.parallel = parallel;
    uint32_t threads = 1;
    check(torch_get_num_threads(&threads), "get_num_threads");
    call.args.num_threads = in_forked_child ? 1 : (int32_t)threads;
    const int error = entry->kernel(&call.args);
    if (error == ENOMEM) throw std::bad_alloc();
    if (error)
        refuse("the kernel refused the call (" + std::string(std::strerror(error)) +
               "); build it again");
    return call.take_result();
}

void moe_layer(StableIValue* stack, uint64_t num_args, uint64_t) {
    Arguments given(stack, num_args);
    set_result(stack, compute(given.x, given.router, given.experts, given.plan()));
}

struct Registration {
    Registration() {
        TorchLibraryHandle library = nullptr;  // lives as long as the process
        check(aoti_torch_library_init_impl("moeflex", "CPU", __FILE__, __LINE__, &library),
              "registration");
        check(torch_library_impl(library, "moe_layer", moe_layer, aoti_torch_abi_version()),
              "registration");
        pthread_atfork([] { pool().lock(); }, [] { pool().unlock(); },
                       [] {
                           pool().unlock();
                           in_forked_child = true;
                       });
    }
} registration;

}  // namespace

// See KernelTable::add.
extern "C" __attribute__((visibility("default"))) int moeflex_register(const char* plan,
                                                                       const MoeflexLayerSpec* spec,
                                                                       MoeflexKernel kernel) {
    return table().add(plan, spec, kernel);
}
