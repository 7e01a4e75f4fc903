// moeflex::moe_layer on CUDA tensors: looks the plan up in a table of layers, takes the kernel that was built for this
// number of tokens, and launches it on the current stream. No host synchronisation, no memory but torch's cached one,
// capturable in a CUDA graph.
//
// Built once a torch version through the C part of the stable ABI, without CUDA headers; layers are registered by
// `moeflex_cuda_register`. Needs no Python at run time. What no kernel here serves is handed to
// moeflex::moe_layer_plain.
#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <type_traits>
#include <unordered_map>

#include "counters.h"
#include "op_layer.h"
#include "stable_tensors.h"

using namespace moeflex::stable;
using namespace moeflex::cuda;

namespace {

// ---- devices --------------------------------------------------------------------------------------
struct Device {
    Context context = nullptr;
    int num_multiprocessors = 0;
    bool is_hopper = false;
    Counters counters;
};

constexpr int kMaxDevices = 64;

Device& device_at(int index) {
    static std::mutex mutex;
    static std::array<Device*, kMaxDevices> devices{};  // never destroyed
    if (index < 0 || index >= kMaxDevices) refuse("CUDA device " + std::to_string(index));
    std::lock_guard<std::mutex> guard(mutex);
    if (devices[size_t(index)]) return *devices[size_t(index)];
    const Driver& d = driver();
    auto device = std::make_unique<Device>();
    int ordinal = 0, major = 0, minor = 0;
    d.check(d.cuDeviceGet(&ordinal, index), "cuDeviceGet");
    d.check(d.cuDevicePrimaryCtxRetain(&device->context, ordinal), "cuDevicePrimaryCtxRetain");
    const auto attribute = [&](int* value, int which) {
        d.check(d.cuDeviceGetAttribute(value, which, ordinal), "cuDeviceGetAttribute");
    };
    attribute(&device->num_multiprocessors, kNumMultiprocessors);
    attribute(&major, kCapabilityMajor);
    attribute(&minor, kCapabilityMinor);
    device->is_hopper = major == 9 && minor == 0;
    devices[size_t(index)] = device.release();
    return *devices[size_t(index)];
}

// What libtorch_cuda adds to the stable ABI; a build without CUDA lacks that library, so that it is found at run time.
struct TorchCuda {
    AOTITorchError (*get_stream)(int32_t, void**) = nullptr;
    AOTITorchError (*allocate)(uint64_t, void**) = nullptr;
    AOTITorchError (*free)(void*) = nullptr;

    TorchCuda() {
        void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
        if (!library) refuse("this torch has no CUDA");
        const auto find = [library](auto& function, const char* name) {
            function = (std::decay_t<decltype(function)>)dlsym(library, name);
        };
        find(get_stream, "aoti_torch_get_current_cuda_stream");
        if (!get_stream) refuse("this torch has no aoti_torch_get_current_cuda_stream");
        find(allocate, "aoti_torch_cuda_caching_allocator_raw_alloc");
        find(free, "aoti_torch_cuda_caching_allocator_raw_delete");
    }
};
const TorchCuda& torch_cuda() {
    static const TorchCuda one;
    return one;
}

Stream current_stream(int device_index) {
    Stream stream = nullptr;
    check(torch_cuda().get_stream(device_index, &stream), "the current stream");
    return stream;
}

// ---- the table ------------------------------------------------------------------------------------
// One kernel, loaded on the devices that have run it.
class LoadedKernel {
  public:
    explicit LoadedKernel(const MoeflexCudaKernel& k)
        : spec(k),
          cubin_((const char*)k.cubin, (const char*)k.cubin + k.cubin_bytes),
          entry_(k.entry) {
        spec.cubin = nullptr;
        spec.entry = nullptr;
    }

    Function on(const Driver& d, int device_index) {
        Function& function = functions_[size_t(device_index)];
        if (function) return function;
        RelaxedCapture relaxed(d);
        Module module = nullptr;
        d.check(d.cuModuleLoadData(&module, cubin_.data()), "loading " + entry_);
        Function found = nullptr;
        d.check(d.cuModuleGetFunction(&found, module, entry_.c_str()), "finding " + entry_);
        d.check(d.cuFuncSetAttribute(found, kMaxDynamicSharedBytes, spec.shared_bytes),
                "asking for shared memory");
        return function = found;
    }

    MoeflexCudaKernel spec;

  private:
    std::vector<char> cubin_;
    std::string entry_;
    std::array<Function, kMaxDevices> functions_{};
};

struct Layer {
    MoeflexCudaLayerSpec spec;
    std::vector<std::shared_ptr<LoadedKernel>> kernels;  // the newest last

    LoadedKernel* kernel_for(int64_t num_tokens) const {
        for (auto it = kernels.rbegin(); it != kernels.rend(); ++it)
            if ((*it)->spec.first_tokens <= num_tokens && num_tokens <= (*it)->spec.last_tokens)
                return it->get();
        return nullptr;
    }
};

// What the tensor maps depend on: the kernel, and address, sizes and strides of every expert tensor.
struct BindingKey {
    std::array<int64_t, 2 + 7 * kMoeflexMaxExpertTensors> words{};
    size_t size = 0;
    void add(int64_t word) { words[size++] = word; }
    bool operator==(const BindingKey& other) const {
        return size == other.size &&
               std::equal(words.begin(), words.begin() + size, other.words.begin());
    }
};
struct BindingHash {
    size_t operator()(const BindingKey& key) const {
        uint64_t hash = 1469598103934665603ull;
        for (size_t i = 0; i < key.size; ++i)
            hash = (hash ^ uint64_t(key.words[i])) * 1099511628211ull;
        return size_t(hash ^ (hash >> 29));
    }
};

// Tensors that move every step must not fill the memory with maps that nobody asks for again.
constexpr size_t kMaxBindings = 1 << 14;

struct Table {
    std::mutex mutex;
    std::unordered_map<std::string, std::vector<std::unique_ptr<Layer>>> layers;
    std::unordered_map<BindingKey, std::shared_ptr<const BoundExperts>, BindingHash> bindings;
};
Table& table() {
    static Table* one =
        new Table;  // never destroyed: threads may be in the op while a process exits
    return *one;
}

// ---- one call ---------------------------------------------------------------------------------------
int index_bytes(int32_t dtype) {
    static const int32_t wide = aoti_torch_dtype_int64(), narrow = aoti_torch_dtype_int32();
    return dtype == wide ? 8 : dtype == narrow ? 4 : 0;
}

bool is_contiguous(const View& v) {
    int64_t expected = 1;
    for (int64_t i = v.dim - 1; i >= 0; --i) {
        if (v.sizes[i] != 1 && v.strides[i] != expected) return false;
        expected *= v.sizes[i];
    }
    return true;
}

int64_t num_rows(const View& v, int64_t inner, const char* what) {
    if (v.dim < 1 || v.sizes[v.dim - 1] != inner)
        refuse(std::string(what) + " must be [..., " + std::to_string(inner) + "]; got " +
               shape_of(v));
    int64_t rows = 1;
    for (int64_t i = 0; i + 1 < v.dim; ++i) rows *= v.sizes[i];
    return rows;
}

Handle empty(int64_t rows, int64_t columns, int32_t dtype, int device_index) {
    const int64_t sizes[2] = {rows, columns}, strides[2] = {columns, 1};
    AtenTensorHandle made = nullptr;
    check(aoti_torch_empty_strided(2, sizes, strides, dtype, aoti_torch_device_type_cuda(),
                                   device_index, &made),
          "empty");
    return Handle(made);
}

// Memory of torch's cache for work on the current stream of the current device. It may be given back as soon as that
// work is queued: what takes it next on this stream runs afterwards.
class Scratch {
  public:
    Scratch(size_t bytes, int device_index) {
        const TorchCuda& torch = torch_cuda();
        if (torch.allocate && torch.free) {  // a microsecond less than a tensor
            check(torch.allocate(bytes, &raw_), "allocating the workspace");
            return;
        }
        tensor_ = empty(1, int64_t(bytes), aoti_torch_dtype_uint8(), device_index);
    }
    Scratch(const Scratch&) = delete;
    ~Scratch() {
        if (raw_) torch_cuda().free(raw_);
    }
    unsigned char* data() const { return (unsigned char*)(raw_ ? raw_ : tensor_.view().data); }

  private:
    void* raw_ = nullptr;
    Handle tensor_;
};

// The data of a tensor as dense rows that begin at multiples of 16 bytes; a copy is kept in `copy`.
const char* dense(const Handle& tensor, const View& v, int device_index, Handle& copy) {
    if (is_contiguous(v) && uintptr_t(v.data) % 16 == 0) return v.data;
    int64_t strides[8], stride = 1;
    if (v.dim > 8) refuse("a tensor of more than 8 axes; got " + shape_of(v));
    for (int64_t i = v.dim - 1; i >= 0; --i) strides[i] = stride, stride *= v.sizes[i];
    AtenTensorHandle made = nullptr;
    check(aoti_torch_empty_strided(v.dim, v.sizes, strides, v.dtype, aoti_torch_device_type_cuda(),
                                   device_index, &made),
          "empty");
    Handle owner(made);
    check(aoti_torch_copy_(made, tensor.tensor, 0), "copy");
    copy = std::move(owner);
    return copy.view().data;
}

struct Call {
    const Handle& x;
    const std::vector<Handle>&router, &experts;
    int device_index;
    View x_view, ids, weights;
};

const Layer* find_layer(const std::string& plan, const Call& call,
                        const std::vector<View>& experts) {
    const auto found = table().layers.find(plan);
    if (found == table().layers.end() || call.router.size() != 2) return nullptr;
    const int dtype = float_code(call.x_view.dtype), combine = float_code(call.weights.dtype);
    for (auto it = found->second.rbegin(); it != found->second.rend(); ++it) {
        const MoeflexCudaLayerSpec& s = (*it)->spec;
        const auto same = [&](const View& v) { return float_code(v.dtype) == s.dtype; };
        if (s.dtype == dtype && s.combine_dtype == combine &&
            s.index_bytes == index_bytes(call.ids.dtype) &&
            std::all_of(experts.begin(), experts.end(), same))
            return it->get();
    }
    return nullptr;
}

std::shared_ptr<const BoundExperts> bind(const Driver& d, const Layer& layer,
                                         const LoadedKernel& kernel,
                                         const std::vector<View>& experts) {
    if (experts.size() > kMoeflexMaxExpertTensors) refuse("one tensor an expert");
    BindingKey key;
    key.add((int64_t)&layer);
    key.add((int64_t)&kernel);
    for (const View& v : experts) {
        if (v.dim > 3) refuse("an expert tensor of more than 3 axes; got " + shape_of(v));
        key.add((int64_t)v.data);
        for (int64_t i = 0; i < v.dim; ++i) key.add(v.sizes[i]), key.add(v.strides[i]);
    }
    auto& bindings = table().bindings;
    const auto found = bindings.find(key);
    if (found != bindings.end()) return found->second;
    std::vector<ExpertTensor> tensors(experts.size());
    for (size_t i = 0; i < experts.size(); ++i) {
        const View& v = experts[i];
        tensors[i].data = v.data;
        tensors[i].dim = v.dim;
        std::copy(v.sizes, v.sizes + v.dim, tensors[i].sizes);
        std::copy(v.strides, v.strides + v.dim, tensors[i].strides);
    }
    if (bindings.size() >= kMaxBindings) bindings.clear();
    return bindings[key] =
               std::make_shared<const BoundExperts>(d, layer.spec, tensors, kernel.spec);
}

void launch(const Driver& d, const MoeflexCudaKernel& kernel, Function function, int num_blocks,
            Stream stream, Parameters& p) {
    void* pointers[7];
    const int num_maps = 3 + kernel.num_row_maps;
    for (int i = 0; i < num_maps; ++i) pointers[i] = &p.maps[i];
    pointers[num_maps] = &p.args;
    LaunchAttribute cooperative = {kCooperative, {}, {1}};
    const LaunchConfig config = {{unsigned(num_blocks), 1, 1},
                                 {unsigned(kernel.num_threads), 1, 1},
                                 unsigned(kernel.shared_bytes),
                                 stream,
                                 kernel.cooperative ? &cooperative : nullptr,
                                 kernel.cooperative ? 1u : 0u};
    d.check(d.cuLaunchKernelEx(&config, function, pointers, nullptr), "launching the layer");
}

// The result, or null when no kernel here serves the call.
AtenTensorHandle compute(const Call& call, const std::string& plan) {
    std::vector<View> experts;
    experts.reserve(call.experts.size());
    for (const Handle& tensor : call.experts) experts.push_back(tensor.view());
    Device& device = device_at(call.device_index);
    if (!device.is_hopper) return nullptr;
    const Driver& d = driver();
    Current current(d, device.context);
    std::unique_lock<std::mutex> lock(table().mutex);
    const Layer* layer = find_layer(plan, call, experts);
    if (!layer) return nullptr;
    const MoeflexCudaLayerSpec& s = layer->spec;
    const int64_t num_tokens = num_rows(call.x_view, s.hidden, "x");
    if (num_rows(call.ids, s.top_k, "ids") != num_tokens ||
        num_rows(call.weights, s.top_k, "the combine weights") != num_tokens)
        refuse("x has " + std::to_string(num_tokens) + " tokens; ids " + shape_of(call.ids) +
               ", weights " + shape_of(call.weights));
    LoadedKernel* kernel = layer->kernel_for(num_tokens);
    if (num_tokens > 0 && !kernel) return nullptr;
    Handle out = empty(num_tokens, s.hidden, torch_code(s.out_dtype), call.device_index);
    if (num_tokens == 0) return out.release();
    const auto bound = bind(d, *layer, *kernel, experts);
    const Function function = kernel->on(d, call.device_index);
    const MoeflexCudaKernel& shape = kernel->spec;
    lock.unlock();

    const Stream stream = current_stream(call.device_index);
    const Workspace workspace(s, shape, num_tokens);
    int* control = device.counters.of(d, stream, workspace.control);
    const Scratch scratch(workspace.scratch_bytes(), call.device_index);
    Parameters p = bound->parameters(d, shape, workspace, scratch.data(), control);
    // Copies go back to torch's cache at the end of this call, as scratch does.
    Handle x_copy, ids_copy, weights_copy;
    p.args.num_tokens = int(num_tokens);
    p.args.x = dense(call.x, call.x_view, call.device_index, x_copy);
    p.args.ids = dense(call.router[0], call.ids, call.device_index, ids_copy);
    p.args.weights = dense(call.router[1], call.weights, call.device_index, weights_copy);
    p.args.out = (void*)out.view().data;
    launch(d, shape, function, device.num_multiprocessors, stream, p);
    return out.release();
}

void moe_layer(StableIValue* stack, uint64_t num_args, uint64_t) {
    Arguments given(stack, num_args);
    Call call{given.x, given.router, given.experts, 0, given.x.view(), {}, {}};
    check(aoti_torch_get_device_index(given.x.tensor, &call.device_index), "device");
    if (given.router.size() == 2) {
        call.ids = given.router[0].view();
        call.weights = given.router[1].view();
    }
    const AtenTensorHandle out = compute(call, given.plan());
    if (out) return set_result(stack, out);
    given.give_away();
    check(torch_call_dispatcher("moeflex::moe_layer_plain", "", stack, aoti_torch_abi_version()),
          "moeflex::moe_layer_plain");
}

struct Registration {
    Registration() {
        TorchLibraryHandle library = nullptr;  // lives as long as the process
        check(aoti_torch_library_init_impl("moeflex", "CUDA", __FILE__, __LINE__, &library),
              "registration");
        check(torch_library_impl(library, "moe_layer", moe_layer, aoti_torch_abi_version()),
              "registration");
    }
} registration;

}  // namespace

// Adds kernels to a layer of a plan, each in the place of an older one for the same tokens. 0, or -1 for a table of
// another version.
extern "C" __attribute__((visibility("default"))) int moeflex_cuda_register(
    const char* plan, const MoeflexCudaLayerSpec* spec, const MoeflexCudaKernel* kernels,
    int num_kernels) {
    if (spec->abi != kMoeflexCudaAbi) return -1;
    try {
        std::lock_guard<std::mutex> guard(table().mutex);
        auto& layers = table().layers[plan];
        auto found = std::find_if(layers.begin(), layers.end(), [&](const auto& layer) {
            return std::memcmp(&layer->spec, spec, sizeof *spec) == 0;
        });
        if (found == layers.end()) {
            layers.push_back(std::make_unique<Layer>(Layer{*spec, {}}));
            found = layers.end() - 1;
        }
        // A launch under way may still use a kernel that is superseded: none is taken out.
        for (int i = 0; i < num_kernels; ++i)
            (*found)->kernels.push_back(std::make_shared<LoadedKernel>(kernels[i]));
        return 0;
    } catch (const std::exception&) {
        return -1;
    }
}
