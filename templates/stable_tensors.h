// Arguments of an op through the C part of torch's stable ABI: tensors, lists, text, and what is said when they do not
// fit. Shared by the op libraries.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace moeflex {
namespace stable {

[[noreturn]] inline void refuse(const std::string& text) {
    throw std::runtime_error("moeflex::moe_layer: " + text);
}

inline void check(AOTITorchError error, const char* what) {
    if (error) refuse(std::string("torch failed in ") + what);
}

struct View {
    const char* data = nullptr;
    int64_t dim = 0;
    int64_t* sizes = nullptr;
    int64_t* strides = nullptr;
    int32_t dtype = 0;  // torch's code
};

inline std::string shape_of(const View& v) {
    std::string s = "[";
    for (int64_t i = 0; i < v.dim; ++i) s += (i ? ", " : "") + std::to_string(v.sizes[i]);
    return s + "]";
}

// Owns a tensor.
struct Handle {
    AtenTensorHandle tensor = nullptr;
    explicit Handle(AtenTensorHandle t = nullptr) : tensor(t) {}
    Handle(const Handle&) = delete;
    Handle(Handle&& other) noexcept : tensor(other.tensor) { other.tensor = nullptr; }
    Handle& operator=(Handle&& other) noexcept {
        std::swap(tensor, other.tensor);
        return *this;
    }
    ~Handle() {
        if (tensor) aoti_torch_delete_tensor_object(tensor);
    }
    AtenTensorHandle release() {
        AtenTensorHandle released = tensor;
        tensor = nullptr;
        return released;
    }
    View view() const {
        View v;
        const void* data = nullptr;
        check(torch_get_const_data_ptr(tensor, &data), "data_ptr");
        v.data = (const char*)data;
        check(aoti_torch_get_dim(tensor, &v.dim), "dim");
        check(aoti_torch_get_sizes(tensor, &v.sizes), "sizes");
        check(aoti_torch_get_strides(tensor, &v.strides), "strides");
        check(aoti_torch_get_dtype(tensor, &v.dtype), "dtype");
        return v;
    }
};

// 0 bf16, 1 fp16, 2 fp32, 3 fp64; -1 for another dtype.
inline int float_code(int32_t dtype) {
    static const int32_t codes[] = {aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float16(),
                                    aoti_torch_dtype_float32(), aoti_torch_dtype_float64()};
    for (int i = 0; i < 4; ++i)
        if (codes[i] == dtype) return i;
    return -1;
}
inline int32_t torch_code(int dtype) {
    static const int32_t codes[] = {aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float16(),
                                    aoti_torch_dtype_float32(), aoti_torch_dtype_float64()};
    return codes[dtype];
}
inline size_t float_bytes(int dtype) {
    return dtype < 2 ? 2 : dtype == 2 ? 4 : 8;
}

// What lies in a slot of a dispatcher stack: a handle, seen as `T`.
template <class T>
T from_slot(StableIValue slot) {
    T handle;
    std::memcpy(&handle, &slot, sizeof handle);
    return handle;
}

// The tensors of a list. A list does not own its tensors: whoever takes them does.
inline std::vector<Handle> take_tensors(StableListHandle list) {
    size_t size = 0;
    check(torch_list_size(list, &size), "a list of tensors");
    std::vector<Handle> handles;
    handles.reserve(size);
    for (size_t i = 0; i < size; ++i) {
        StableIValue item;
        check(torch_list_get_item(list, i, &item), "a list of tensors");
        handles.emplace_back(from_slot<AtenTensorHandle>(item));
    }
    return handles;
}

// moe_layer(Tensor x, Tensor[] router, Tensor[] experts, str plan): owns what lies on the stack until it is given away.
class Arguments {
  public:
    Arguments(StableIValue* stack, uint64_t num_args)
        : x(num_args == 4 ? from_slot<AtenTensorHandle>(stack[0]) : nullptr) {
        if (num_args != 4)
            refuse("the schema has another number of arguments than this library was built for");
        router_list_ = from_slot<StableListHandle>(stack[1]);
        experts_list_ = from_slot<StableListHandle>(stack[2]);
        plan_ = from_slot<StringHandle>(stack[3]);
        router = take_tensors(router_list_);
        experts = take_tensors(experts_list_);
    }
    Arguments(const Arguments&) = delete;
    ~Arguments() {
        if (given_away_) return;
        torch_delete_list(router_list_);
        torch_delete_list(experts_list_);
        torch_delete_string(plan_);
    }

    std::string plan() const {
        const char* text = nullptr;
        size_t length = 0;
        check(torch_string_length(plan_, &length), "the plan's text");
        check(torch_string_c_str(plan_, &text), "the plan's text");
        return std::string(text, length);
    }
    // The stack owns its slots again: another op is called with it.
    void give_away() {
        given_away_ = true;
        x.release();
        for (auto* list : {&router, &experts})
            for (Handle& tensor : *list) tensor.release();
    }

    Handle x;
    std::vector<Handle> router, experts;

  private:
    StableListHandle router_list_ = nullptr, experts_list_ = nullptr;
    StringHandle plan_ = nullptr;
    bool given_away_ = false;
};

inline void set_result(StableIValue* stack, AtenTensorHandle tensor) {
    stack[0] = 0;
    std::memcpy(&stack[0], &tensor, sizeof tensor);
}

}  // namespace stable
}  // namespace moeflex
