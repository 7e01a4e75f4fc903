// From the tensors of a call to the arguments of a kernel: shapes and strides checked, experts as matrices. Shared by the
// CPU op libraries.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "args.h"
#include "op_table.h"
#include "stable_tensors.h"

namespace moeflex {

using namespace stable;

// ---- scratch memory, kept between calls up to a bound ---------------------------------------------
constexpr size_t kKeptBytes = size_t(256) << 20;

class ScratchPool {
  public:
    void* acquire(size_t bytes) {
        {
            std::lock_guard<std::mutex> guard(mutex_);
            for (size_t i = 0; i < free_.size(); ++i)
                if (header(free_[i])->bytes >= bytes) {
                    void* memory = free_[i];
                    free_.erase(free_.begin() + (long)i);
                    kept_ -= header(memory)->bytes;
                    return memory;
                }
        }
        const size_t total = (bytes + kHeader + 4095) / 4096 * 4096;
        void* memory = std::aligned_alloc(4096, total);
        if (!memory) return nullptr;
#ifdef MADV_HUGEPAGE
        if (total >= (size_t(4) << 20)) madvise(memory, total, MADV_HUGEPAGE);
#endif
        void* usable = (char*)memory + kHeader;
        header(usable)->bytes = total - kHeader;
        return usable;
    }

    void release(void* memory) {
        const size_t bytes = header(memory)->bytes;
        {
            std::lock_guard<std::mutex> guard(mutex_);
            // A buffer that came back is worth more than smaller ones.
            while (!free_.empty() && kept_ + bytes > kKeptBytes &&
                   header(free_.front())->bytes < bytes)
                drop(0);
            if (kept_ + bytes <= kKeptBytes) {
                free_.push_back(memory);
                kept_ += bytes;
                return;
            }
        }
        std::free((char*)memory - kHeader);
    }

    void lock() { mutex_.lock(); }
    void unlock() { mutex_.unlock(); }

  private:
    static constexpr size_t kHeader = 64;
    struct Header {
        size_t bytes;
    };
    static Header* header(void* usable) { return (Header*)((char*)usable - kHeader); }
    void drop(size_t i) {
        kept_ -= header(free_[i])->bytes;
        std::free((char*)free_[i] - kHeader);
        free_.erase(free_.begin() + (long)i);
    }
    std::mutex mutex_;
    std::vector<void*> free_;
    size_t kept_ = 0;
};

// Never destroyed: threads may still be in the op while a process exits.
inline ScratchPool& pool() {
    static ScratchPool* one = new ScratchPool;
    return *one;
}
inline void* acquire(size_t bytes) {
    return pool().acquire(bytes);
}
inline void release(void* memory) {
    pool().release(memory);
}

inline const char* name_of(int32_t dtype) {
    static const char* names[] = {"bf16", "fp16", "fp32", "fp64"};
    return dtype >= 0 && dtype < 4 ? names[dtype] : "another dtype";
}

// [..., inner] as rows of `inner` with one stride between rows; false when the leading axes do not collapse.
inline bool collapse(const View& v, int64_t* rows, int64_t* row_stride) {
    bool possible = true;
    *rows = 1;
    *row_stride = 0;
    for (int64_t i = v.dim - 2; i >= 0; --i) {
        if (v.sizes[i] == 1) continue;
        if (*rows == 1)
            *row_stride = v.strides[i];
        else
            possible = possible && v.strides[i] == *row_stride * *rows;
        *rows *= v.sizes[i];
    }
    return possible || *rows == 0;
}

// A dense copy of a view whose leading axes do not collapse.
inline std::vector<char> densify(const View& v, size_t size) {
    int64_t total = 1;
    for (int64_t i = 0; i < v.dim; ++i) total *= v.sizes[i];
    std::vector<char> out((size_t)total * size);
    std::vector<int64_t> at((size_t)v.dim, 0);
    for (int64_t n = 0; n < total; ++n) {
        int64_t offset = 0;
        for (int64_t i = 0; i < v.dim; ++i) offset += at[(size_t)i] * v.strides[i];
        std::memcpy(out.data() + (size_t)n * size, v.data + offset * (int64_t)size, size);
        for (int64_t i = v.dim - 1; i >= 0 && ++at[(size_t)i] == v.sizes[i]; --i) at[(size_t)i] = 0;
    }
    return out;
}

struct Rows {
    const void* data = nullptr;
    int64_t num = 0, row_stride = 0, inner_stride = 0;
    std::vector<char> copy;
};

inline Rows rows_of(const View& v, size_t size, int64_t inner, const char* what) {
    if (v.dim < 1 || v.sizes[v.dim - 1] != inner)
        refuse(std::string(what) + " must be [..., " + std::to_string(inner) + "]; got " +
               shape_of(v));
    Rows r{v.data, 0, 0, v.strides[v.dim - 1], {}};
    if (!collapse(v, &r.num, &r.row_stride)) {
        r.copy = densify(v, size);
        r.data = r.copy.data();
        r.row_stride = inner;
        r.inner_stride = 1;
    }
    return r;
}

// ---- expert tensors -> matrices -----------------------------------------------------------------------
class Experts {
  public:
    Experts(const MoeflexLayerSpec& spec, const std::vector<Handle>& tensors) : spec_(spec) {
        const size_t want = (size_t)spec.num_roles * (spec.stacked ? 1 : (size_t)spec.num_experts);
        if (tensors.size() != want)
            refuse("this plan takes " + std::to_string(want) + " expert tensors; got " +
                   std::to_string(tensors.size()));
        views_.reserve(tensors.size());
        for (const Handle& t : tensors) views_.push_back(t.view());
    }

    // Whether the dtypes are those of `spec`; all tensors of a role must agree.
    bool fits(const MoeflexLayerSpec& spec) const {
        const size_t each = views_.size() / (size_t)spec.num_roles;
        for (size_t i = 0; i < views_.size(); ++i)
            if (float_code(views_[i].dtype) != spec.role_dtypes[i / each]) return false;
        return true;
    }

    // Matrices of one role. `part` 0 or 1 of gate and up in one tensor: moved by `part * shift` along out, out strides
    // times `spread`.
    std::vector<MoeflexMatrix> matrices(int role, int64_t outs, int64_t ins, bool out_in,
                                        int64_t shift, int64_t spread) const {
        std::vector<MoeflexMatrix> found((size_t)spec_.num_experts);
        const size_t size = float_bytes(spec_.role_dtypes[role]);
        const bool bias = ins == 0;
        for (int64_t e = 0; e < spec_.num_experts; ++e) {
            const View& v =
                views_[spec_.stacked ? (size_t)role : (size_t)(role * spec_.num_experts + e)];
            const int64_t lead = spec_.stacked ? 1 : 0;
            if (e == 0 || !spec_.stacked) check_shape(v, role, lead, outs, ins, out_in);
            const int64_t out_axis = lead + (bias || out_in ? 0 : 1),
                          in_axis = lead + (out_in ? 1 : 0);
            MoeflexMatrix& m = found[(size_t)e];
            m.out_stride = v.strides[out_axis] * spread;
            m.in_stride = bias ? 0 : v.strides[in_axis];
            m.data = v.data +
                     ((lead ? e * v.strides[0] : 0) + shift * v.strides[out_axis]) * (int64_t)size;
        }
        return found;
    }

  private:
    void check_shape(const View& v, int role, int64_t lead, int64_t outs, int64_t ins,
                     bool out_in) const {
        const bool bias = ins == 0;
        const int64_t first = bias || out_in ? outs : ins, second = out_in ? ins : outs;
        const int64_t dims = lead + (bias ? 1 : 2);
        if (v.dim == dims && (!lead || v.sizes[0] == spec_.num_experts) && v.sizes[lead] == first &&
            (bias || v.sizes[lead + 1] == second))
            return;
        std::string want = "[";
        if (lead) want += std::to_string(spec_.num_experts) + ", ";
        want += std::to_string(first) + (bias ? "" : ", " + std::to_string(second)) + "]";
        refuse("expert tensor of role " + std::to_string(role) + " must be " + want + "; got " +
               shape_of(v));
    }

    const MoeflexLayerSpec& spec_;
    std::vector<View> views_;
};

struct Matrices {
    std::vector<MoeflexMatrix> gate, up, down, gate_bias, up_bias, down_bias;
};

// Gate and up out of the first role(s), weights and biases alike.
inline void first_projection(const Experts& experts, const MoeflexLayerSpec& s, int role,
                             int64_t ins, bool out_in, std::vector<MoeflexMatrix>& gate,
                             std::vector<MoeflexMatrix>& up) {
    const int64_t I = s.intermediate;
    if (s.gate_layout == kMoeflexGateNone) {
        gate = experts.matrices(role, I, ins, out_in, 0, 1);
    } else if (s.gate_layout == kMoeflexGateSeparate) {
        gate = experts.matrices(role, I, ins, out_in, 0, 1);
        up = experts.matrices(role + 1, I, ins, out_in, 0, 1);
    } else {
        const bool alternate = s.gate_layout == kMoeflexGateInterleaved ||
                               s.gate_layout == kMoeflexGateInterleavedUpFirst;
        const bool up_first = s.gate_layout == kMoeflexGateConcatUpFirst ||
                              s.gate_layout == kMoeflexGateInterleavedUpFirst;
        const int64_t second = alternate ? 1 : I, spread = alternate ? 2 : 1;
        gate = experts.matrices(role, 2 * I, ins, out_in, up_first ? second : 0, spread);
        up = experts.matrices(role, 2 * I, ins, out_in, up_first ? 0 : second, spread);
    }
}

inline const MoeflexMatrix* or_null(const std::vector<MoeflexMatrix>& m) {
    return m.empty() ? nullptr : m.data();
}

inline void set_ids(MoeflexArgs& args, const View& v) {
    static const struct {
        int32_t (*code)();
        int32_t bytes, is_signed;
    } kinds[] = {{aoti_torch_dtype_int64, 8, 1},  {aoti_torch_dtype_int32, 4, 1},
                 {aoti_torch_dtype_int16, 2, 1},  {aoti_torch_dtype_int8, 1, 1},
                 {aoti_torch_dtype_uint8, 1, 0},  {aoti_torch_dtype_uint16, 2, 0},
                 {aoti_torch_dtype_uint32, 4, 0}, {aoti_torch_dtype_uint64, 8, 0}};
    for (const auto& kind : kinds)
        if (kind.code() == v.dtype) {
            args.ids_bytes = kind.bytes;
            args.ids_signed = kind.is_signed;
            return;
        }
    refuse("ids must be of an integer dtype");
}

// ---- the kernels of one op ----------------------------------------------------------------------------
template <class Kernel>
class KernelTable {
  public:
    struct Entry {
        MoeflexLayerSpec spec;
        Kernel kernel;
    };

    // The newest kernel of `plan` for these dtypes. `builder` names the function that builds one.
    const Entry* find(const std::string& plan, int x_dtype, const std::vector<Handle>& tensors,
                      const char* builder, std::unique_ptr<Experts>& experts) {
        std::lock_guard<std::mutex> guard(mutex_);
        const auto found = entries_.find(plan);
        if (found == entries_.end())
            refuse(std::string("no CPU kernel was registered for this plan; ") + builder +
                   " builds it: " + plan.substr(0, 200));
        for (auto it = found->second.rbegin(); it != found->second.rend(); ++it) {
            const auto& entry = *it;
            experts = std::make_unique<Experts>(entry->spec, tensors);
            if (entry->spec.x_dtype == x_dtype && experts->fits(entry->spec)) return entry.get();
        }
        refuse(std::string("the CPU kernels of this plan were built for other dtypes than x ") +
               name_of(x_dtype) +
               " and the expert tensors given; compile the model again after a change of dtype");
    }

    // Adds a kernel, or makes it the newest of its plan. 0, or -1 for a spec of another version.
    int add(const char* plan, const MoeflexLayerSpec* spec, Kernel kernel) {
        if (spec->abi != kMoeflexAbi || spec->num_roles > kMoeflexMaxRoles) return -1;
        try {
            std::lock_guard<std::mutex> guard(mutex_);
            auto& entries = entries_[plan];
            for (size_t i = 0; i < entries.size(); ++i)
                if (std::memcmp(&entries[i]->spec, spec, sizeof *spec) == 0) {
                    std::rotate(entries.begin() + (long)i, entries.begin() + (long)i + 1,
                                entries.end());
                    return 0;
                }
            entries.push_back(std::make_unique<Entry>(Entry{*spec, kernel}));
            return 0;
        } catch (const std::exception&) {
            return -1;
        }
    }

  private:
    std::mutex mutex_;
    std::unordered_map<std::string, std::vector<std::unique_ptr<Entry>>> entries_;
};

// ---- one call -------------------------------------------------------------------------------------------
// The tensors of a call as arguments of a kernel, its result among them; what they point at lives here.
class LayerCall {
  public:
    MoeflexArgs args = {};

    // `ids_per_token` columns of ids and weights.
    LayerCall(const Handle& x, const std::vector<Handle>& router, const Experts& experts,
              const MoeflexLayerSpec& s, int64_t ids_per_token) {
        if (router.size() != 2)
            refuse("the router's tensors must be [ids, weights]; got " +
                   std::to_string(router.size()));
        args.abi = kMoeflexAbi;
        args.acquire = acquire;
        args.release = release;
        args.num_experts = s.num_experts;
        args.hidden = s.hidden;
        args.intermediate = s.intermediate;
        args.direct_rows = s.direct_rows;
        args.top_k = s.top_k;
        set_tokens(x, router, s, ids_per_token);
        set_experts(experts, s);
        make_result(s);
    }
    AtenTensorHandle take_result() { return result_.release(); }

  private:
    void set_tokens(const Handle& x, const std::vector<Handle>& router, const MoeflexLayerSpec& s,
                    int64_t ids_per_token) {
        const View tokens = x.view(), ids = router[0].view(), weights = router[1].view();
        rows_ = rows_of(tokens, float_bytes(s.x_dtype), s.hidden, "x");
        args.x = rows_.data;
        args.num_tokens = rows_.num;
        args.x_token_stride = rows_.row_stride;
        args.x_hidden_stride = rows_.inner_stride;
        set_ids(args, ids);
        args.weights_dtype = float_code(weights.dtype);
        if (args.weights_dtype < 0) refuse("the combine weights must be bf16, fp16, fp32 or fp64");
        ids_ = rows_of(ids, (size_t)args.ids_bytes, ids_per_token, "ids");
        weights_ =
            rows_of(weights, float_bytes(args.weights_dtype), ids_per_token, "the combine weights");
        if (ids_.num != rows_.num || weights_.num != rows_.num)
            refuse("x has " + std::to_string(rows_.num) + " tokens; ids " + shape_of(ids) +
                   ", weights " + shape_of(weights));
        args.ids = ids_.data;
        args.ids_token_stride = ids_.row_stride;
        args.ids_slot_stride = ids_.inner_stride;
        args.weights = weights_.data;
        args.weights_token_stride = weights_.row_stride;
        args.weights_slot_stride = weights_.inner_stride;
    }

    void set_experts(const Experts& experts, const MoeflexLayerSpec& s) {
        Matrices& m = matrices_;
        const int first = s.gate_layout == kMoeflexGateSeparate ? 2 : 1;
        const int down = first * (s.has_b13 ? 2 : 1);
        first_projection(experts, s, 0, s.hidden, s.w13_out_in, m.gate, m.up);
        if (s.has_b13) first_projection(experts, s, first, 0, true, m.gate_bias, m.up_bias);
        m.down = experts.matrices(down, s.hidden, s.intermediate, s.w2_out_in, 0, 1);
        if (s.has_b2) m.down_bias = experts.matrices(down + 1, s.hidden, 0, true, 0, 1);
        args.gate = m.gate.data();
        args.up = or_null(m.up);
        args.down = m.down.data();
        args.gate_bias = or_null(m.gate_bias);
        args.up_bias = or_null(m.up_bias);
        args.down_bias = or_null(m.down_bias);
        args.bias13_dtype = s.has_b13 ? s.role_dtypes[first] : 0;
        args.bias2_dtype = s.has_b2 ? s.role_dtypes[down + 1] : 0;
        args.up_interleaved = s.gate_layout == kMoeflexGateInterleaved          ? 1
                              : s.gate_layout == kMoeflexGateInterleavedUpFirst ? -1
                                                                                : 0;
    }

    void make_result(const MoeflexLayerSpec& s) {
        const int64_t sizes[2] = {rows_.num, s.hidden}, strides[2] = {s.hidden, 1};
        check(aoti_torch_empty_strided(2, sizes, strides, torch_code(s.out_dtype),
                                       aoti_torch_device_type_cpu(), 0, &result_.tensor),
              "empty");
        const void* data = nullptr;
        check(torch_get_const_data_ptr(result_.tensor, &data), "data_ptr");
        args.out = const_cast<void*>(data);
    }

    Rows rows_, ids_, weights_;
    Matrices matrices_;
    Handle result_;
};

}  // namespace moeflex
