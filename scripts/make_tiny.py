"""Write an untrained, tiny checkpoint with all the files of a real one: OpenVLA, OpenVLA-OFT, PI0 or PI0.5.

python scripts/make_tiny.py --folder runs/tiny --decoding parallel --chunk 4
python scripts/make_tiny.py --model pi0 --folder runs/tiny --variant pi05 --chunk 4
"""

import argparse

import tyro

from vla_accel.models.pi0.tiny import make_tiny_pi0
from vla_accel.models.tiny import make_tiny_openvla

MAKERS = {"openvla": make_tiny_openvla, "pi0": make_tiny_pi0}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", choices=MAKERS, default="openvla")
    model, rest = parser.parse_known_args()
    note = f"These are the options of --model {model.model}; the other is {(set(MAKERS) - {model.model}).pop()}."
    tyro.cli(MAKERS[model.model], args=rest, description=note, config=(tyro.conf.AvoidSubcommands,))
