// out[M, N] = x[M, K] @ w[N, K].T for few rows on Hopper, in bf16, or of e4m3 or int8 codes with a scale for each row.
//
// The weight takes the side of the tensor cores' instruction that is 64 high, so that M is its free side. A block of
// threads owns 64 * GROUPS outputs and ROWS rows; one thread of it keeps the copy engine busy, each group of 128 others
// multiplies 64 outputs. SPLITS blocks, a cluster, share the inputs of a tile and add their sums through each other's
// shared memory, in the order of the inputs, so that a result never depends on which block was first.
//
// With GATED the first half of the weight is a gate's and the second half what it multiplies: a block takes as many
// outputs of each, and what leaves it is silu(gate) * up.
//
// Compiled with GROUPS, ROWS, SPLITS, STAGES, GATED, WIDTH (rows of an instruction) and KIND (0: bf16, 1: e4m3, 2: int8)
// defined, and `wgmma` before this text.

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap { u64 words[16]; };

constexpr int STEP_BYTES = 128;  // of a row in one step: the width of the swizzle
constexpr int STEP_INPUTS = KIND == 0 ? 64 : 128;
constexpr int OUTPUTS = 64 * GROUPS;
constexpr int WEIGHT_BYTES = OUTPUTS * STEP_BYTES, INPUT_BYTES = ROWS * STEP_BYTES;
constexpr int STAGE_BYTES = WEIGHT_BYTES + INPUT_BYTES;
constexpr int CONSUMERS = 128 * GROUPS;
constexpr int SUMS = ROWS / 2;         // of a thread
constexpr int OWN = SUMS / SPLITS;     // of those, what a block of the cluster finishes
constexpr int OWN_ROWS = ROWS / SPLITS;
#ifndef WEIGHT_POLICY
#define WEIGHT_POLICY 0x12F0000000000000ull
#define INPUT_POLICY 0x14F0000000000000ull
#endif
constexpr int PITCH = OUTPUTS * 2 + 16;  // bytes of a row of results in shared memory, without bank conflicts
constexpr int HALF = GATED ? OUTPUTS / 2 : OUTPUTS;  // outputs that lie side by side in the weight

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni ready;\nbra.uni again;\nready:\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// A box of the tensor from input `inner` and row `outer` on; weights are read once, inputs by every block.
__device__ __forceinline__ void copy_tile(u32 to, const TensorMap* map, u32 barrier, int inner, int outer, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(barrier), "r"(inner), "r"(outer), "l"(policy)
      : "memory");
}

// Rows of 128 bytes, swizzled over eight of them.
__device__ __forceinline__ u64 descriptor(u32 address) {
  return (u64(1) << 62) | (u64(1024 >> 4) << 32) | (u64(1) << 16) | u64((address & 0x3FFFF) >> 4);
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ void copy_weights(
    u32 to, const TensorMap* map, u32 barrier, int inner, int output, int n, u64 policy) {
  copy_tile(to, map, barrier, inner, output, policy);
  if (GATED) copy_tile(to + HALF * STEP_BYTES, map, barrier, inner, n / 2 + output, policy);
}

__device__ __forceinline__ void produce(
    const TensorMap* weights, const TensorMap* inputs, u32 stages, u32 full, u32 empty, int output, int row, int first,
    int steps, int n) {
  const u64 once = WEIGHT_POLICY, often = INPUT_POLICY;
  asm volatile("prefetch.tensormap [%0];\nprefetch.tensormap [%1];" ::"l"(weights), "l"(inputs) : "memory");
  const int ahead = steps < STAGES ? steps : STAGES;
  for (int s = 0; s < ahead; ++s) {  // weights are there before the kernel that makes the input ends
    barrier_expect(full + 8 * s, STAGE_BYTES);
    copy_weights(stages + s * STAGE_BYTES, weights, full + 8 * s, (first + s) * STEP_INPUTS, output, n, once);
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int s = 0; s < ahead; ++s)
    copy_tile(stages + s * STAGE_BYTES + WEIGHT_BYTES, inputs, full + 8 * s, (first + s) * STEP_INPUTS, row, often);
#pragma unroll 1
  for (int s = ahead, stage = 0, parity = 0; s < steps; ++s) {
    barrier_wait(empty + 8 * stage, parity);
    const u32 to = stages + stage * STAGE_BYTES, barrier = full + 8 * stage;
    barrier_expect(barrier, STAGE_BYTES);
    copy_weights(to, weights, barrier, (first + s) * STEP_INPUTS, output, n, once);
    copy_tile(to + WEIGHT_BYTES, inputs, barrier, (first + s) * STEP_INPUTS, row, often);
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
}

__device__ __forceinline__ void multiply(Sum (&sums)[SUMS], u32 stages, u32 full, u32 empty, int group, int steps) {
  const bool speaks = threadIdx.x % 32 == 0;
  int last = 0;
#pragma unroll 1
  for (int s = 0, stage = 0, parity = 0; s < steps; ++s) {
    barrier_wait(full + 8 * stage, parity);
    const u32 at = stages + stage * STAGE_BYTES;
    const u64 a = descriptor(at + group * 64 * STEP_BYTES), b = descriptor(at + WEIGHT_BYTES);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < STEP_BYTES / 32; ++i)
#pragma unroll
      for (int part = 0; part < ROWS / WIDTH; ++part)
        wgmma(sums + part * WIDTH / 2, a + 2 * i, b + (part * WIDTH * STEP_BYTES >> 4) + 2 * i, s + i > 0);
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (s > 0 && speaks) barrier_arrive(empty + 8 * last);
    last = stage;
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < SUMS; ++i) settled(sums[i]);  // or the compiler reads them before, and waits for each instruction
}

#if SPLITS > 1
constexpr int SLOT_BYTES = OWN * CONSUMERS * 4;  // sums of one block for another, four of a thread at a time

// What the other blocks finish goes into this block's shared memory, from where they take it.
__device__ __forceinline__ void give(const Sum (&sums)[SUMS], u32 memory, u32 rank) {
#pragma unroll
  for (int owner = 0; owner < SPLITS; ++owner) {
    if (owner == rank) continue;
    const u32 slot = memory + (owner - (owner > rank)) * SLOT_BYTES + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < OWN; i += 4) {
      const Sum* four = sums + owner * OWN + i;
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(slot + i * CONSUMERS * 4), "r"(bits(four[0])),
                   "r"(bits(four[1])), "r"(bits(four[2])), "r"(bits(four[3])) : "memory");
    }
  }
}

__device__ __forceinline__ void take(Sum (&own)[OWN], const Sum (&sums)[SUMS], u32 memory, u32 rank) {
  Sum mine[OWN];
#pragma unroll
  for (int owner = 0; owner < SPLITS; ++owner)
    if (owner == rank)
#pragma unroll
      for (int i = 0; i < OWN; ++i) mine[i] = sums[owner * OWN + i];
#pragma unroll
  for (int peer = 0; peer < SPLITS; ++peer) {
    u32 slot = memory + (rank - (rank > peer)) * SLOT_BYTES + threadIdx.x * 16;
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(slot) : "r"(peer));
#pragma unroll
    for (int i = 0; i < OWN; i += 4) {
      u32 word[4] = {bits(mine[i]), bits(mine[i + 1]), bits(mine[i + 2]), bits(mine[i + 3])};
      if (peer != rank)
        asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "r"(slot + i * CONSUMERS * 4)
                     : "memory");
#pragma unroll
      for (int e = 0; e < 4; ++e) own[i + e] = peer == 0 ? from_bits(word[e]) : own[i + e] + from_bits(word[e]);
    }
  }
}
#endif

// silu(gate) * up of two of each, with the roundings and the bits of the Triton kernel for it.
__device__ __forceinline__ u32 silu_mul(u32 gates, u32 ups) {
  float result[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float x = __uint_as_float(e ? gates & 0xFFFF0000u : gates << 16);
    const float up = __uint_as_float(e ? ups & 0xFFFF0000u : ups << 16);
    float power;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(-x, 1.4426950408889634f)));
    const float silu = __fdiv_rn(x, __fadd_rn(1.0f, power));
    result[e] = __fmul_rn(__uint_as_float(pack(0.0f, silu) & 0xFFFF0000u), up);
  }
  return pack(result[0], result[1]);
}

// Scales and rounds the rows from `row` on that this block finishes into its shared memory.
__device__ __forceinline__ void settle_rows(
    const Sum (&own)[OWN], unsigned char* memory, const float* token_scale, const float* weight_scale, int group,
    int output, int row, int m, int n) {
  static_assert(!GATED || KIND == 0, "scales of a gate and of what it multiplies do not lie side by side");
  const int lane = threadIdx.x % 32, column = group * 64 + threadIdx.x % 128 / 32 * 16;
  float by_output[2] = {1.0f, 1.0f};
  if (KIND != 0)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int o = output + column + half * 8 + lane / 4;
      by_output[half] = o < n ? weight_scale[o] : 0.0f;
    }
#pragma unroll
  for (int j = 0; j < OWN_ROWS / 8; j += 2) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float v[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        v[e] = float(own[(j + i / 2) * 4 + i % 2 * 2 + e]);
        if (KIND != 0) {
          const int r = row + (j + i / 2) * 8 + lane % 4 * 2 + e;
          v[e] = __fmul_rn(__fmul_rn(v[e], by_output[i % 2]), r < m ? token_scale[r] : 0.0f);
        }
      }
      words[i] = pack(v[0], v[1]);
    }
    const u32 to = shared_address(memory + ((j + lane / 16) * 8 + lane % 8) * PITCH + (column + lane / 8 % 2 * 8) * 2);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
  }
}

// Writes those rows, through shared memory for whole lines; of a gate and what it multiplies, the product.
__device__ __forceinline__ void finish(
    const Sum (&own)[OWN], unsigned char* memory, unsigned short* out, const float* token_scale,
    const float* weight_scale, int group, int output, int row, int m, int n) {
  settle_rows(own, memory, token_scale, weight_scale, group, output, row, m, n);
  constexpr int WRITERS = GATED ? CONSUMERS : 128, CHUNKS = GATED ? HALF / 8 : 8;  // groups that need no other go on
  const int start = GATED ? 0 : group * 64, width = GATED ? n / 2 : n;
  asm volatile("bar.sync %0, %1;" ::"r"(GATED ? 1 : 2 + group), "n"(WRITERS) : "memory");
  for (int i = threadIdx.x % WRITERS; i < OWN_ROWS * CHUNKS; i += WRITERS) {
    const int r = i / CHUNKS, c = start + i % CHUNKS * 8;
    if (row + r >= m || output + c >= width) continue;
    uint4 eight = *reinterpret_cast<uint4*>(memory + r * PITCH + c * 2);
    if (GATED) {
      const uint4 ups = *reinterpret_cast<uint4*>(memory + r * PITCH + (HALF + c) * 2);
      eight = {silu_mul(eight.x, ups.x), silu_mul(eight.y, ups.y), silu_mul(eight.z, ups.z), silu_mul(eight.w, ups.w)};
    }
    *reinterpret_cast<uint4*>(out + u64(row + r) * width + output + c) = eight;
  }
}

extern "C" __global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(CONSUMERS + 128, 1) hopper_gemm(
    const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap inputs, unsigned short* out,
    const float* token_scale, const float* weight_scale, int m, int n, int steps) {
  extern __shared__ unsigned char raw[];
  __shared__ alignas(8) u64 barriers[2 * STAGES];
  unsigned char* memory = raw + (1024 - shared_address(raw) % 1024) % 1024;
  const u32 stages = shared_address(memory), full = shared_address(barriers), empty = full + 8 * STAGES;
  const int group = threadIdx.x / 128;
  const u32 rank = blockIdx.x % SPLITS;
  const int output = blockIdx.x / SPLITS * HALF, row = blockIdx.y * ROWS;
  const int first = steps * rank / SPLITS, mine = steps * (rank + 1) / SPLITS - first;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 4 * GROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (group == GROUPS) {
    FEWER_REGISTERS;
    if (threadIdx.x == CONSUMERS) produce(&weights, &inputs, stages, full, empty, output, row, first, mine, n);
    if (SPLITS > 1) {
      __syncwarp();
      cluster_sync();
      cluster_sync();
    }
  } else {
    MORE_REGISTERS;
    Sum sums[SUMS];
    multiply(sums, stages, full, empty, group, mine);
    asm volatile("griddepcontrol.wait;\nbar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
#if SPLITS > 1
    Sum own[OWN];
    give(sums, stages, rank);
    cluster_sync();
    take(own, sums, stages, rank);
    cluster_sync();
    finish(own, memory, out, token_scale, weight_scale, group, output, row + rank * OWN_ROWS, m, n);
#else
    finish(sums, memory, out, token_scale, weight_scale, group, output, row, m, n);
#endif
  }
}
