// One layer kernel on the machine of machine.h. config.h includes the kernel, and names the choices.
#include "config.h"

using namespace moeflex;

// `arguments`: pointers to the kernel's parameters, a `MapContents` for every tensor map. Returns 0, or 1 when no
// thread can go on.
extern "C" int emulate(void** arguments, int num_blocks, int num_threads, unsigned seed) {
    TensorMap maps[6];
    for (int i = 0; i < NUM_MAPS; ++i) maps[i].words[0] = reinterpret_cast<u64>(arguments[i]);
    const LayerArgs& args = *static_cast<const LayerArgs*>(arguments[NUM_MAPS]);
    machine::Machine gpu;
    machine::gpu = &gpu;
    using Layer = KERNEL<Config>;
    return !gpu.run(num_blocks, num_threads, sizeof(Layer::Shared), seed, [&] {
        auto& shared = *reinterpret_cast<Layer::Shared*>(machine::gpu->current->block->shared);
        Layer{args, shared}.run(RUN_ARGUMENTS(maps));
    });
}
