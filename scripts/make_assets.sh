#!/usr/bin/env bash
# Makes the small checkpoints that ship in vla_accel/assets, from random weights, on a CPU (about 10 minutes each on a
# core). Each imitates the embedded simulator's scripted expert in three stages: where an episode begins, since there
# only the words tell which block is meant (later the nearest mostly is); then whole episodes, at half speed and pushed
# about, to learn where the named block is; then a slow expert, so that what is left for reinforcement learning is to be
# quick.
# Usage: scripts/make_assets.sh [FOLDER for what lies between]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=${1:-runs/assets}
export OMP_NUM_THREADS=1

imitate() { # model, stage before, stage, options
  local start=$work/$1/$2
  [ "$2" = init ] || start=$start/policy
  python scripts/sft_vla.py --model "$1" --policy.path "$start" --run.output-dir "$work/$1/$3" \
    --sft.instruction-dropout 0.1 --run.eval-episodes 0 "${@:4}"
}

teach() { # model, steps of the three stages, options; `slow` of the caller are further options of the third
  local scratch=(--sft.learning-rate 1e-3 --sft.muon-learning-rate 0.02 --data.speed 0.5 --data.noise 0.4)
  imitate "$1" init words "${scratch[@]}" --sft.steps "$2" --data.episodes 8000 --env.max-episode-steps 3 "${@:5}"
  imitate "$1" words aim "${scratch[@]}" --sft.steps "$3" --data.episodes 4000 --env.max-episode-steps 24 "${@:5}"
  imitate "$1" aim slow --sft.learning-rate 5e-4 --sft.steps "$4" --data.episodes 1000 --data.noise 0.15 \
    "${@:5}" "${slow[@]}"
  rm -rf "vla_accel/assets/$1"
  python scripts/export_vla.py --run "$work/$1/slow" --out "vla_accel/assets/$1" --dtype bfloat16
  # The speed is one that gives 30 to 50 % here, on training states.
  python scripts/eval_vla.py --model "$1" --policy.path "vla_accel/assets/$1" --episodes 400 --split train
}

make_asset() { # model, decoding, chunk, speed of the slow expert, how much it varies
  local slow=(--sft.smoothing 3 --data.speed "$4" --data.speed-jitter "$5")
  python scripts/make_tiny.py --folder "$work/$1/init" --decoding "$2" --chunk "$3" \
    --no-fused --hidden 64 --intermediate 128 --use-film
  teach "$1" 1500 3500 600 --sft.batch-size 32 --sft.smoothing 6
}

make_flow_asset() { # model, speed of the slow expert, how much it varies
  local slow=(--data.speed "$2" --data.speed-jitter "$3")
  python scripts/make_tiny.py --model pi0 --folder "$work/$1/init" --variant "$1" --chunk 4 --num-steps 4 \
    --layers 3 --width 64 --mlp-dim 128 --num-heads 4 --head-dim 32 --max-state-dim 8 --max-action-dim 7 \
    --cameras left_wrist_0_rgb --rename wrist left_wrist_0_rgb --min-period 0.5 --min-time 0.2 --time-alpha 2.5
  teach "$1" 500 1000 400 --sft.batch-size 48 --sft.repeats 8 --policy.freeze-vlm False
}

make_asset openvla autoregressive 1 0.28 0.3
make_asset openvla-oft parallel 4 0.34 0.6
make_flow_asset pi0 0.212 0.3
make_flow_asset pi05 0.218 0.3
