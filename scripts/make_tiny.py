"""Write an untrained, tiny OpenVLA or OpenVLA-OFT checkpoint, with all the files of a real one.

python scripts/make_tiny.py --folder runs/tiny --decoding parallel --chunk 4
"""

import tyro

from vla_accel.models.tiny import make_tiny_openvla

if __name__ == "__main__":
    tyro.cli(make_tiny_openvla)
