// h = f(clamp(gate)) * (clamp(up) + up_shift), or f(clamp(gate)) without an up projection; fp32 in
// registers.
#pragma once
#include "ptx.cuh"

namespace moeflex {

enum class Activation { kSilu, kGelu, kGeluTanh, kRelu, kRelu2, kSigmoid, kIdentity };

// NaN stays NaN, as in torch.
MOEFLEX_DEVICE float clamp(float x, float low, float high) {
    return x < low ? low : (x > high ? high : x);
}

// The divisor may overflow to infinity: the quotient is then 0, as it must be.
MOEFLEX_DEVICE float logistic(float x) {
    return __fdividef(1.f, 1.f + __expf(-x));
}

// x * Phi(x) from a rational approximation of erfc (Abramowitz and Stegun 7.1.26, absolute
// error 1.5e-7): erff spills next to 128 accumulators. The small tail is computed as such, so that
// negative x keeps its relative accuracy.
MOEFLEX_DEVICE float gelu(float x) {
    float z = fabsf(x) * 0.70710678118654752f, t = __fdividef(1.f, fmaf(0.3275911f, z, 1.f));
    float poly =
        fmaf(fmaf(fmaf(fmaf(1.061405429f, t, -1.453152027f), t, 1.421413741f), t, -0.284496736f), t,
             0.254829592f);
    float half_tail = 0.5f * poly * t * __expf(-z * z);
    return x * (x < 0.f ? half_tail : 1.f - half_tail);
}

template <Activation kKind>
MOEFLEX_DEVICE float activation_function(float x, float alpha) {
    if constexpr (kKind == Activation::kSilu) {
        return __fdividef(x, 1.f + __expf(-alpha * x));
    } else if constexpr (kKind == Activation::kGelu) {
        return gelu(x);
    } else if constexpr (kKind == Activation::kGeluTanh) {
        return x * logistic(1.5957691216057308f * (x + 0.044715f * x * x * x));
    } else if constexpr (kKind == Activation::kRelu) {
        return x < 0.f ? 0.f : x;
    } else if constexpr (kKind == Activation::kRelu2) {
        return x < 0.f ? 0.f : x * x;
    } else if constexpr (kKind == Activation::kSigmoid) {
        return logistic(x);
    } else {
        return x;
    }
}

template <class Config>
MOEFLEX_DEVICE float activate(float gate, float up) {
    if constexpr (Config::kClampGate) gate = clamp(gate, Config::kGateMin, Config::kGateMax);
    float value = activation_function<Config::kActivation>(gate, Config::kAlpha);
    if constexpr (!Config::kGated) return value;
    if constexpr (Config::kClampUp) up = clamp(up, Config::kUpMin, Config::kUpMax);
    return value * (up + Config::kUpShift);
}

}  // namespace moeflex
