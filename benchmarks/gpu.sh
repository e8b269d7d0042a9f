#!/usr/bin/env bash
# The GPU's tests and the tables of docs/ that were measured on one, each part under a time limit of its own, into a folder.
#
#   benchmarks/gpu.sh FOLDER [PART...]
#
# Parts, all by default, in the order of ALL below. Two cards are used by two calls with other parts and folders, each with
# CUDA_VISIBLE_DEVICES. WORKERS is the number of processes of the unit tests (13).
# MODEL_PATH names the folder of SmolLM2-135M-Instruct for the part `mismatch`, which has random weights alone without it.
# VLLM_PATH and TRL_PATH name folders that are put before the path of the children that need vLLM and TRL; without them
# the parts `vllm_*` and TRL's half of `iteration` use what is installed. A part that fails or is cut leaves what it printed.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="$(mkdir -p "$1" && cd "$1" && pwd)"
shift
ALL="tests memory_tests exact refresh cost decode gemm aligned rollout sizes learner compile memory iteration vllm_tests vllm_refresh
vllm_transport parity mismatch"
parts="${*:-$ALL}"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"

# part NAME SECONDS COMMAND...: what it printed is NAME.txt, and its last lines are shown.
part() {
    local name="$1" seconds="$2" start=$SECONDS
    shift 2
    timeout -s INT -k 10 "$seconds" "$@" >"$out/$name.txt" 2>&1
    echo "== $name: exit status $?, $((SECONDS - start)) s"
    grep -v "Warning\|^$\|warn" "$out/$name.txt" | tail -n 12 | cut -c1-220
}

for name in $parts; do
    case "$name" in
    tests)
        # Side by side: most of the time goes into compiling kernels. -v names a test as it ends, so that a run that is cut
        # says what failed.
        export LQRL_TEST_ACCELERATOR=cuda
        part integration 540 python3 -m pytest -v --tb=short -p no:cacheprovider tests/integration/test_exact.py \
            tests/integration/test_exact_guard.py tests/integration/test_exact_proximal.py \
            tests/integration/test_phase_timer.py &
        part tests 540 python3 -m pytest -v -n "${WORKERS:-13}" -m gpu --tb=short -p no:cacheprovider tests/unit
        wait
        grep "FAILED\|ERROR" "$out/tests.txt" | sort -u | head -40
        unset LQRL_TEST_ACCELERATOR
        ;;
    exact)
        part exact 120 python3 benchmarks/mismatch.py --exact --device cuda --dtype float32,bfloat16 --schemes none int8_w8a8 \
            int8_w8a16 int4_w4a16_g32 fp8_per_channel fp8_per_block int8_w8a8+lm_head+kv_int8 fp8_per_channel+kv_fp8
        ;;
    refresh) part refresh 60 python3 benchmarks/refresh.py --repeats 11 ;;
    cost)
        part cost_0.6B 120 python3 benchmarks/exact_cost.py --device cuda --repeats 3 --rows 64
        part cost_8B 150 python3 benchmarks/exact_cost.py --device cuda --repeats 3 --rows 64 --model 8B --layers 8 \
            --formats int8_w8a8 int4_w4a16
        ;;
    decode)
        part decode_step 150 python3 benchmarks/decode_step.py --model 8B --batch 8 64 256 --kernels 14 --formats none \
            none+kv_fp8_static fp8_per_channel+kv_fp8_static int8_w8a8 int4_w4a16
        part decode_attention 120 python3 benchmarks/decode_attention.py --splits 1 2 4
        part cache_write 40 python3 benchmarks/cache_write.py
        part prefill 90 python3 benchmarks/prefill.py --kernels 12
        part decode_rows 40 python3 benchmarks/decode_rows.py
        part rollout_steps 90 python3 benchmarks/rollout_steps.py
        ;;
    gemm)
        part decode_gemm 200 python3 benchmarks/decode_gemm.py --seconds 190
        part hopper_gemm 100 python3 benchmarks/hopper_gemm.py --models 0.6B 8B 32B --rows 8 32 64 128 256
        ;;
    aligned) part aligned_linear 120 python3 benchmarks/aligned_linear.py ;;
    rollout)
        # The fastest of two calls; a start of vLLM takes up to 140 s.
        for pair in "none none" "fp8_per_channel fp8_static" "int8_w8a8 none"; do
            part "rollout_${pair%% *}" 290 python3 benchmarks/rollout.py ${VLLM_PATH:+--vllm-path "$VLLM_PATH"} --repeats 2 \
                --engines vllm torch --formats "${pair%% *}" --kv "${pair##* }" --batch 8 64 256 --limit 250 --budget 280 \
                --rows "$out/rollout.jsonl"
        done
        ;;
    sizes)
        part rollout_small 200 python3 benchmarks/rollout.py --engines torch --model 0.6B --formats none fp8_per_channel int8_w8a8 \
            --kv none fp8_static fp8 --batch 64 256 --budget 190 --rows "$out/rollout.jsonl"
        part rollout_large 300 python3 benchmarks/rollout.py --engines torch --model 32B --formats none fp8_per_channel int8_w8a8 \
            --kv none fp8_static --batch 8 64 --budget 290 --rows "$out/rollout.jsonl"
        ;;
    compile)
        part compile 400 python3 benchmarks/learner.py --models 0.6B --learners none fp8_per_channel int8_w8a8 \
            --token-budget 32768 --compile --limit 120 --budget 390 --rows "$out/learner.jsonl"
        ;;
    learner) part learner 300 python3 benchmarks/learner.py --budget 280 --rows "$out/learner.jsonl" ;;
    memory_tests)
        # Free memory is the card's: these tests are skipped beside others.
        part memory_tests 150 python3 -m pytest -v -m gpu --tb=short -p no:cacheprovider \
            tests/unit/test_engine_memory.py tests/unit/test_optimizer_offload.py tests/unit/test_engine_vllm_staging.py
        LQRL_TEST_ACCELERATOR=cuda part memory_runs 90 python3 -m pytest -v --tb=short -p no:cacheprovider \
            tests/integration/test_memory.py
        ;;
    memory)
        part memory 320 python3 benchmarks/memory.py --repeats 2 --limit 110 --budget 300 --rows "$out/memory.jsonl"
        ;;
    iteration)
        # Alone on its card: vLLM refuses to start where others give memory back meanwhile.
        part iteration 560 python3 benchmarks/iteration.py ${TRL_PATH:+--trl-path "$TRL_PATH"} \
            ${VLLM_PATH:+--vllm-path "$VLLM_PATH"} --learners ${VLLM_PATH:+trl-vllm} none fp8_per_channel+kv_fp8_static trl \
            --token-budget 32768 --master bfloat16 --limit 350 --budget 550 --rows "$out/iteration.jsonl"
        ;;
    vllm_tests)
        # Side by side: engines of tiny models, most of whose time is the start.
        for file in tests/integration/test_vllm_*.py; do
            LQRL_TEST_ACCELERATOR=cuda VLLM_USE_FLASHINFER_SAMPLER="${VLLM_USE_FLASHINFER_SAMPLER:-0}" \
                PYTHONPATH="$PYTHONPATH${VLLM_PATH:+:$VLLM_PATH}" part "$(basename "$file" .py)" 420 \
                python3 -m pytest -v --tb=short -p no:cacheprovider "$file" &
        done
        wait
        ;;
    vllm_refresh)
        part vllm_refresh 560 python3 benchmarks/vllm_refresh.py ${VLLM_PATH:+--vllm-path "$VLLM_PATH"} --budget 540 \
            --rows "$out/vllm_refresh.jsonl"
        ;;
    vllm_transport)
        part vllm_transport 560 python3 benchmarks/vllm_transport.py ${VLLM_PATH:+--vllm-path "$VLLM_PATH"} --budget 540 \
            --rows "$out/vllm_transport.jsonl"
        ;;
    parity) PYTHONPATH="$PYTHONPATH${VLLM_PATH:+:$VLLM_PATH}" part parity 200 python3 benchmarks/vllm_parity.py ;;
    mismatch)
        vllm=(${VLLM_PATH:+--vllm-path "$VLLM_PATH"})
        [[ -z "${MODEL_PATH:-}" ]] || part mismatch 120 python3 benchmarks/mismatch.py --model "$MODEL_PATH" --device cuda \
            --dtype float32,bfloat16 --prompts 8 --samples 4 --tokens 48 --ignore-eos
        [[ -z "${MODEL_PATH:-}" ]] || part mismatch_smollm2 250 python3 benchmarks/vllm_mismatch.py "${vllm[@]}" --budget 240 \
            --model "$MODEL_PATH" --limit 90 --rows "$out/mismatch.jsonl" --formats none int8_w8a8 fp8_per_channel \
            int4_w4a16_g32 fp8_per_tensor nvfp4_w4a16 int8_w8a16
        part mismatch_8B 150 python3 benchmarks/vllm_mismatch.py "${vllm[@]}" --budget 140 --model 8B --layers 4 --limit 90 \
            --rows "$out/mismatch.jsonl" --formats none int8_w8a8 fp8_per_channel fp8_per_block int4_w4a16
        ;;
    *) echo "no part is called $name" >&2; exit 2 ;;
    esac
done
