// Activation functions on vectors of fp32 and on scalars of fp64.
//
// exp is within 2 ulp over its whole range; NaN stays NaN, clamps keep NaN, as torch's do.
#pragma once
#include "simd.h"

namespace moeflex {

enum class WeightPosition { output, hidden, input };

// The nearest values of type T.
template <class T>
inline VecF rounded(VecF value) {
    T nearest[kLanes];
    store(nearest, value);
    return load(nearest);
}
template <class T>
inline double rounded(double value) {
    T nearest;
    convert(&value, &nearest, 1);
    return to_float(nearest);
}

// Rounded to the dtype T of the weights where the plan asks for it.
template <class Config, class T, class V>
inline V gemm_result(V value) {
    if constexpr (Config::round_gemms) return rounded<T>(value);
    return value;
}

// exp by 2^n * p(r), r in [-ln2/2, ln2/2], ln2 in two pieces. Saturates to 0 and inf.
inline VecF exp_of(VecF x) {
    const VecF top = splat(88.8f), bottom = splat(-103.9f);
    VecF z = select(x > top, top, x);
    z = select(z < bottom, bottom, z);
    const VecF magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    VecF n = (z * 1.44269504089f + magic) - magic;
    VecF r = z - n * 0.693145751953125f;
    r = r - n * 1.42860682030941723212e-6f;
    VecF p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    VecF e = p * r * r + r + 1.0f;
    // 2^n in two factors, so that neither overflows and subnormal results are reached.
    VecI whole = __builtin_convertvector(n, VecI);
    VecI half = whole >> 1;
    e = e * (VecF)((half + 127) << 23);
    e = e * (VecF)((whole - half + 127) << 23);
    e = select(x > top, splat(INFINITY), e);
    return select(x != x, x, e);
}
inline double exp_of(double x) {
    return std::exp(x);
}

inline VecF erf_of(VecF x) {
    for (int i = 0; i < kLanes; ++i) x[i] = std::erf(x[i]);
    return x;
}
inline double erf_of(double x) {
    return std::erf(x);
}

inline VecF choose(VecI mask, VecF yes, VecF no) {
    return select(mask, yes, no);
}
inline double choose(bool mask, double yes, double no) {
    return mask ? yes : no;
}

template <class V>
inline V constant(double x);
template <>
inline VecF constant<VecF>(double x) {
    return splat((float)x);
}
template <>
inline double constant<double>(double x) {
    return x;
}

template <class V>
inline V clamp(V z, double low, double high) {
    const V lo = constant<V>(low), hi = constant<V>(high);
    if (low != -INFINITY) z = choose(z < lo, lo, z);
    if (high != INFINITY) z = choose(z > hi, hi, z);
    return z;
}

template <class V>
inline V sigmoid(V z) {
    return constant<V>(1) / (constant<V>(1) + exp_of(-z));
}

enum class Activation { silu, gelu, gelu_tanh, relu, relu2, sigmoid, identity };

// f(clamp(gate)); Config holds the constants of the plan.
template <class Config, class V>
inline V activate(V z) {
    z = clamp(z, Config::gate_min, Config::gate_max);
    switch (Config::activation) {
        case Activation::silu:
            return z / (constant<V>(1) + exp_of(z * constant<V>(-Config::alpha)));
        case Activation::gelu:
            return z * constant<V>(0.5) *
                   (constant<V>(1) + erf_of(z * constant<V>(0.70710678118654752440)));
        case Activation::gelu_tanh: {  // z/2 * (1 + tanh(u)) == z * sigmoid(2u)
            V u = z * (constant<V>(0.79788456080286535588) +
                       constant<V>(0.79788456080286535588 * 0.044715) * z * z);
            return z / (constant<V>(1) + exp_of(u * constant<V>(-2)));
        }
        case Activation::relu: return choose(z < constant<V>(0), constant<V>(0), z);
        case Activation::relu2: z = choose(z < constant<V>(0), constant<V>(0), z); return z * z;
        case Activation::sigmoid: return sigmoid(z);
        default: return z;
    }
}

// f(clamp(gate)) * (clamp(up) + shift)
template <class Config, class V>
inline V activate(V gate, V up) {
    up = clamp(up, Config::up_min, Config::up_max);
    if (Config::up_shift != 0) up = up + constant<V>(Config::up_shift);
    return activate<Config>(gate) * up;
}

// One value of the hidden layer from the biased sums of gemm0 (`up` is read only where there is one).
template <class Config, class V, class Weight>
inline V hidden_of(V gate, V up, Weight weight) {
    gate = gemm_result<Config, typename Config::W13>(gate);
    if constexpr (Config::gated)
        gate = activate<Config>(gate, gemm_result<Config, typename Config::W13>(up));
    else
        gate = activate<Config>(gate);
    if (Config::position == WeightPosition::hidden) gate = gate * weight;
    return gemm_result<Config, typename Config::W2>(gate);
}

}  // namespace moeflex
