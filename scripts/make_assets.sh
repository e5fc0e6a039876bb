#!/usr/bin/env bash
# Makes the small checkpoints that ship in vla_accel/assets, from random weights, on a CPU (about 15 minutes each on a
# core; 10 for PI0 and PI0.5). Each imitates the embedded simulator's scripted expert: first one of half speed that is
# pushed about, to learn where the named block is; then a slow one, so that what is left for reinforcement learning is to
# be quick.
# Usage: scripts/make_assets.sh [FOLDER for what lies between]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=${1:-runs/assets}
export OMP_NUM_THREADS=1

ship() { # model
  rm -rf "vla_accel/assets/$1"
  python scripts/export_vla.py --run "$work/$1/slow" --out "vla_accel/assets/$1" --dtype bfloat16
  # The speed is one that gives 30 to 50 % here, on training states; docs/learning.md tells how it was found.
  python scripts/eval_vla.py --model "$1" --policy.path "vla_accel/assets/$1" --episodes 400 --split train
}

make_asset() { # model, decoding, chunk, speed of the slow expert
  local sft=(python scripts/sft_vla.py --model "$1" --sft.batch-size 32 --sft.instruction-dropout 0.1 --run.eval-episodes 0)
  python scripts/make_tiny.py --folder "$work/$1/init" --decoding "$2" --chunk "$3" \
    --no-fused --hidden 64 --intermediate 128 --use-film
  "${sft[@]}" --policy.path "$work/$1/init" --run.output-dir "$work/$1/aim" \
    --sft.steps 7000 --sft.learning-rate 1e-3 --sft.muon-learning-rate 0.02 --sft.smoothing 6 \
    --data.episodes 4000 --data.speed 0.5 --data.noise 0.4 --env.max-episode-steps 24
  "${sft[@]}" --policy.path "$work/$1/aim/policy" --run.output-dir "$work/$1/slow" \
    --sft.steps 600 --sft.learning-rate 5e-4 --sft.smoothing 3 \
    --data.episodes 1000 --data.speed "$4" --data.speed-jitter 0.3 --data.noise 0.15
  ship "$1"
}

make_flow_asset() { # model, speed of the slow expert
  local sft=(python scripts/sft_vla.py --model "$1" --policy.freeze-vlm False --sft.batch-size 48 --sft.repeats 8
    --sft.instruction-dropout 0.1 --run.eval-episodes 0)
  local scratch=(--sft.learning-rate 1e-3 --sft.muon-learning-rate 0.02 --data.speed 0.5 --data.noise 0.4)
  python scripts/make_tiny.py --model pi0 --folder "$work/$1/init" --variant "$1" --chunk 4 --num-steps 4 \
    --layers 3 --width 64 --mlp-dim 128 --num-heads 4 --head-dim 32 --max-state-dim 8 --max-action-dim 7 \
    --cameras left_wrist_0_rgb --rename wrist left_wrist_0_rgb --min-period 0.5 --min-time 0.2 --time-alpha 2.5
  # Where an episode begins, only the words tell which block is meant; later the nearest mostly is.
  "${sft[@]}" "${scratch[@]}" --policy.path "$work/$1/init" --run.output-dir "$work/$1/words" \
    --sft.steps 500 --data.episodes 8000 --env.max-episode-steps 3
  "${sft[@]}" "${scratch[@]}" --policy.path "$work/$1/words/policy" --run.output-dir "$work/$1/aim" \
    --sft.steps 1000 --data.episodes 4000 --env.max-episode-steps 24
  "${sft[@]}" --policy.path "$work/$1/aim/policy" --run.output-dir "$work/$1/slow" \
    --sft.steps 400 --sft.learning-rate 5e-4 \
    --data.episodes 1000 --data.speed "$2" --data.speed-jitter 0.3 --data.noise 0.15
  ship "$1"
}

# What ships of these two was trained while Muon's learning rate stayed constant: this gives other weights.
make_asset openvla autoregressive 1 0.28
make_asset openvla-oft parallel 4 0.27
make_flow_asset pi0 0.212
make_flow_asset pi05 0.212
