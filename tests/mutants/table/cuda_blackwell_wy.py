"""Stage B3 of the backward on Blackwell."""

from .mutant import EMULATOR, mutants

KERNEL = "src/cuda/blackwell_stages/wy_dqkg.cu"
MEMORY = "src/cuda/blackwell_stages/wy_memory.h"
PRODUCTS = "src/cuda/blackwell_stages/wy_products.h"
WORKER = "src/cuda/blackwell_stages/wy_worker.h"

ONE_SM = f"KDA_EMULATOR_ARCH=100 KDA_EMULATOR_SMS=1 {EMULATOR}"  # a CTA has all chunks
CASES = "All/StagesOnCuda.SpecialsAreTheirOracle/"
TESTS = (ONE_SM, f"{CASES}halves_K_first128")
V_FIRST = (ONE_SM, f"{CASES}halves64")
IDENTICAL = (ONE_SM, f"{CASES}whole_identical")
NAN = (ONE_SM, "WyOnCuda.ReadsNoUpperTriangle:WyOnCuda.KeepsOthersNaNOut")

UNITS = {MEMORY: [KERNEL], PRODUCTS: [KERNEL], WORKER: [KERNEL]}

WAIT = "  wait_for_stream();  // without tensor memory, which the kernel in front may still ask for\n"
ALLOCATE = (
    "  if (warp == kWyIssuer) ptx::tmem_alloc(base + WyAt::tensors, WyTensors::columns), ptx::tmem_relinquish();\n"
)

MUTANTS = [
    *mutants(
        KERNEL,
        TESTS,
        ("Blackwell's B3: tensor memory is held while the kernel in front runs", WAIT + ALLOCATE, ALLOCATE + WAIT),
        (
            "Blackwell's B3: no barrier behind the allocation",
            "  __syncthreads();  // mbarriers and tensor memory are there\n",
            "",
        ),
    ),
    *mutants(
        MEMORY,
        TESTS,
        ("Blackwell's B3: the next row of a state", "first_row(item.at.n) + item.at.index", "first_row(item.at.n)"),
        (
            "Blackwell's B3: phases do not alternate",
            "{ ptx::wait_barrier(barrier, n % 2); }",
            "{ ptx::wait_barrier(barrier, 0); }",
        ),
    ),
    *mutants(
        PRODUCTS,
        TESTS,
        (
            "Blackwell's B3: tiles of states are filled while products read them",
            "      wait_for_last({WyAt::states_full, WyAt::all_made}, item);\n",
            "      wait_for_last({WyAt::states_full}, item);\n",
        ),
        (
            "Blackwell's B3: q, k and G are overwritten before they are read",
            "      wait_for_last({WyAt::rows_read}, item);\n",
            "      wait_for_last({WyAt::rows_full}, item);\n",
        ),
        ("Blackwell's B3: products do not wait for x", "    wait(WyAt::x_there, item);\n", ""),
        ("Blackwell's B3: products do not wait for J", "wait(WyAt::inverse_there, item), ", ""),
        ("Blackwell's B3: no fence behind a barrier", "    ptx::fence_tmem_after_sync();\n", ""),
    ),
    *mutants(
        PRODUCTS,
        V_FIRST,
        (
            "Blackwell's B3: V-first states as K-first ones",
            "return kVFirst ? Operand::of_lines(base_ + at, kStateHalf) : ",
            "return ",
        ),
    ),
    *mutants(
        PRODUCTS,
        IDENTICAL,
        (
            "Blackwell's B3: J as one number",
            "dv_new, lines(WyAt::x_0), true);",
            "dv_new, lines(WyAt::x_0), false);",
        ),
    ),
    *mutants(
        WORKER,
        TESTS,
        (
            "Blackwell's B3: x takes the place of J while others write J",
            "    ptx::sync_threads(kWyBarrier, kWyWorkers);  // J is written: a commit does not tell that\n",
            "",
        ),
        ("Blackwell's B3: no fence between stores and products", "ptx::fence_shared_for_async(), ", ""),
        ("Blackwell's B3: no fence in front of a barrier", ", ptx::fence_tmem_before_sync();", ";"),
        (
            "Blackwell's B3: one lane arrives for others",
            "    __syncwarp();\n    if (lane_ == 0)",
            "    if (lane_ == 0)",
        ),
        (
            "Blackwell's B3: sums are not waited for",
            "    ptx::sync_threads(kWyBarrier, kWyWorkers);  // sums of all are there\n",
            "",
        ),
    ),
    *mutants(
        WORKER,
        NAN,
        ("Blackwell's B3: J above its diagonal", "&& j < i ?", "&& j <= i ?"),
        ("Blackwell's B3: rows of other sequences", "    if (item.rows() < kChunk) clear_tail(item);\n", ""),
    ),
]
