// Prints what a launch would be given: tensor maps as they reach the driver, workspace, arguments.
//
// stdin: the 14 numbers of MoeflexCudaLayerSpec; the 28 of MoeflexCudaKernel before its binary; T; the number of expert
// tensors; for each its address, number of axes, sizes and strides.
#include <iostream>

#include "cuda/op_layer.h"

using namespace moeflex::cuda;

namespace {

int record(TensorMap* map, int type, unsigned rank, const void* address, const uint64_t* dims,
           const uint64_t* strides, const uint32_t* box, const uint32_t*, int, int, int, int) {
    static uint64_t number = 0;
    map->words[0] = number;
    std::cout << "map " << number++ << ' ' << (type == kTypeBfloat16 ? "bf16" : "fp16") << ' '
              << uint64_t(address);
    for (unsigned i = 0; i < rank; ++i) std::cout << ' ' << dims[i];
    for (unsigned i = 0; i + 1 < rank; ++i) std::cout << ' ' << strides[i];
    for (unsigned i = 0; i < rank; ++i) std::cout << ' ' << box[i];
    std::cout << '\n';
    return 0;
}

}  // namespace

int main() {
    MoeflexCudaLayerSpec spec;
    for (size_t i = 0; i < sizeof spec / 4; ++i) std::cin >> ((int32_t*)&spec)[i];
    MoeflexCudaKernel kernel{};
    for (size_t i = 0; i < offsetof(MoeflexCudaKernel, cubin_bytes) / 4; ++i)
        std::cin >> ((int32_t*)&kernel)[i];
    int64_t num_tokens;
    size_t num_tensors;
    std::cin >> num_tokens >> num_tensors;
    std::vector<ExpertTensor> tensors(num_tensors);
    for (ExpertTensor& t : tensors) {
        uint64_t address;
        std::cin >> address >> t.dim;
        t.data = (const char*)address;
        for (int64_t i = 0; i < t.dim; ++i) std::cin >> t.sizes[i];
        for (int64_t i = 0; i < t.dim; ++i) std::cin >> t.strides[i];
    }
    Driver driver;
    driver.cuTensorMapEncodeTiled = record;
    try {
        const Workspace w(spec, kernel, num_tokens);
        const BoundExperts bound(driver, spec, tensors, kernel);
        auto* const scratch = (unsigned char*)(uint64_t(1) << 50);
        auto* const control = (int*)(uint64_t(1) << 40);
        const Parameters p = bound.parameters(driver, kernel, w, scratch, control);
        std::cout << "workspace " << w.control << ' ' << w.routes << ' ' << w.h << ' ' << w.y << ' '
                  << w.num_rows << ' ' << w.scratch_bytes() << '\n';
        std::cout << "order";
        for (int i = 0; i < 3 + kernel.num_row_maps; ++i) std::cout << ' ' << p.maps[i].words[0];
        std::cout << "\nargs " << p.args.up_first << ' ' << p.args.bias13_expert_stride << ' '
                  << uint64_t(p.args.bias_gate) << ' ' << uint64_t(p.args.bias_up) << ' '
                  << uint64_t(p.args.bias_down) << ' ' << p.args.h - scratch << ' '
                  << p.args.y - scratch << '\n';
    } catch (const std::exception& error) {
        std::cout << "refused " << error.what() << '\n';
    }
}
