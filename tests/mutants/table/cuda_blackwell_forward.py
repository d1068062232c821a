"""Forward on Blackwell."""

from .mutant import EMULATOR, emulated, mutants

FORWARD = "src/cuda/engine/blackwell_prefill.cu"
SEGMENTS = "src/cuda/engine/blackwell_prefill_segments.cu"
CONSUMER = "src/cuda/engine/blackwell_consumer.h"
PRODUCTS = "src/cuda/engine/blackwell_products.h"
PAIR = "src/cuda/engine/pair_kernel.h"
SEGMENT_PAIR = "src/cuda/engine/segments_kernel.h"

TESTS = (
    f"KDA_EMULATOR_ARCH=100 {EMULATOR}",
    emulated("ForwardChunkOnCuda.IsTheOracle/bound_33", "ForwardChunkOnCuda.IsTheOracle/bound_packed")[1],
)

SPOILT = (TESTS[0], emulated("ForwardContract.CorrectionsAreNaNFromThereOn/K64")[1])

# In the order of seed 2: in that of 1, maps come to stages that consumers happen to have read.
MAPS = (f"KDA_EMULATOR_SEED=2 {TESTS[0]}", emulated("ForwardChunkOnCuda.IsTheOracle/bound_maps")[1])

UNITS = {
    CONSUMER: [FORWARD, SEGMENTS],
    PRODUCTS: [FORWARD, SEGMENTS],
    PAIR: [FORWARD],
    SEGMENT_PAIR: [SEGMENTS],
}

WAIT, ALLOCATE = "  wait_for_stream();\n", "  [[maybe_unused]] const Tensors tensors(memory);\n"

MUTANTS = [
    *mutants(
        PRODUCTS,
        TESTS,
        (
            "Blackwell's forward: threads do not wait for their stores to tensor memory",
            "{ ptx::wait_for_tmem_stores(), ptx::fence_tmem_before_sync(); }",
            "{ ptx::fence_tmem_before_sync(); }",
        ),
        (
            "Blackwell's forward: no fence in front of a barrier",
            "{ ptx::wait_for_tmem_stores(), ptx::fence_tmem_before_sync(); }",
            "{ ptx::wait_for_tmem_stores(); }",
        ),
        (
            "Blackwell's forward: no fence behind a barrier",
            "void after_sync() const { ptx::fence_tmem_after_sync(); }",
            "void after_sync() const {}",
        ),
        (
            "Blackwell's forward: no fence behind products",
            "phase_++ % 2);\n    ptx::fence_tmem_after_sync();\n",
            "phase_++ % 2);\n",
        ),
        (
            "Blackwell's forward: products begin before all threads have stored",
            "    before_sync(), sync(), after_sync();\n  }\n\n  const",
            "    before_sync(), after_sync();\n  }\n\n  const",
        ),
        (
            "Blackwell's forward: the address of tensor memory is read behind a relaxed barrier alone",
            "    __syncthreads();  // the address of tensor memory and the mbarriers are there\n",
            "",
        ),
        (
            "Blackwell's forward: registers are used before tensor memory has been read",
            "own_ + column), ptx::wait_for_tmem_loads();",
            "own_ + column);",
        ),
    ),
    *mutants(
        CONSUMER,
        TESTS,
        (
            "Blackwell's forward: the state goes to tensor memory before it decays",
            "    const bool spoilt = decay(stage);\n    products_.store_state(S_);\n",
            "    products_.store_state(S_);\n    const bool spoilt = decay(stage);\n",
        ),
        (
            "Blackwell's forward: outputs are overwritten while TMA reads them",
            "    if (kOutputs && stores()) ptx::wait_for_bulk_reads<0>();\n",
            "",
        ),
        (
            "Blackwell's forward: products are not waited for",
            "stage_outputs(x.out);\n    products_.wait();\n",
            "stage_outputs(x.out);\n",
        ),
        (
            "Blackwell's forward: a chunk is released too early",
            "    products_.wait();\n    products_.load_state(S_);\n    round_outputs",
            "    products_.load_state(S_);\n    round_outputs",
        ),
    ),
    *mutants(
        PAIR,
        TESTS,
        (
            "Blackwell's forward: tensor memory is held while the kernel in front runs",
            WAIT + ALLOCATE,
            ALLOCATE + WAIT,
        ),
    ),
    *mutants(
        SEGMENT_PAIR,
        MAPS,
        (
            "Blackwell's segments: tensor memory is held while the kernel in front runs",
            WAIT + ALLOCATE,
            ALLOCATE + WAIT,
        ),
    ),
    *mutants(
        CONSUMER,
        SPOILT,
        (
            "Blackwell's forward: U of rows that the producer left out is 0",
            "if (again || spoilt) [[unlikely]]",
            "if (again) [[unlikely]]",
        ),
        (
            "Blackwell's forward: rows of a chunk are released while lanes look for NaN in them",
            "    __syncwarp();  // all lanes have read the rows\n",
            "",
        ),
    ),
    *mutants(
        PRODUCTS,
        MAPS,
        (
            "Blackwell's segments: both consumers have the same tensor memory",
            " + kConsumer * TensorMemory::columns)",
            ")",
        ),
        (
            "Blackwell's segments: a map is applied before all threads have stored the state",
            "store_for_all(TensorMemory::rest, rest);",
            "store(TensorMemory::rest, rest);",
        ),
    ),
    *mutants(
        CONSUMER,
        MAPS,
        (
            "Blackwell's segments: stages are released to which maps come",
            "number + kHeld < chunks",
            "number < chunks",
        ),
        (
            "Blackwell's segments: chunks with outputs wait for the warps of M",
            "ring_.release(number, kWarpsOfEach)",
            "ring_.release(number)",
        ),
    ),
]
