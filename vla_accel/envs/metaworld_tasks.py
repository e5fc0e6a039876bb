"""Meta-World's 50 tasks: what a policy is told, and the groups by difficulty (arXiv 2206.14244).

Not here: the simulator (`metaworld.py`).
Usage: `INSTRUCTIONS["reach-v3"]`, `SUITES["easy"]`.
"""

from __future__ import annotations

INSTRUCTIONS: dict[str, str] = {
    "assembly-v3": "pick up the ring and put it over the peg",
    "basketball-v3": "throw the ball into the basket",
    "bin-picking-v3": "move the cube from one bin into the other",
    "box-close-v3": "put the lid on the box",
    "button-press-topdown-v3": "press the button from above",
    "button-press-topdown-wall-v3": "reach over the wall and press the button from above",
    "button-press-v3": "press the button",
    "button-press-wall-v3": "reach around the wall and press the button",
    "coffee-button-v3": "press the button of the coffee machine",
    "coffee-pull-v3": "pull the mug away from the coffee machine",
    "coffee-push-v3": "push the mug under the coffee machine",
    "dial-turn-v3": "turn the dial",
    "disassemble-v3": "take the ring off the peg",
    "door-close-v3": "close the door",
    "door-lock-v3": "lock the door by turning its lock",
    "door-open-v3": "open the door",
    "door-unlock-v3": "unlock the door by turning its lock",
    "drawer-close-v3": "push the drawer shut",
    "drawer-open-v3": "pull the drawer open",
    "faucet-close-v3": "turn the faucet off",
    "faucet-open-v3": "turn the faucet on",
    "hammer-v3": "hit the nail with the hammer",
    "hand-insert-v3": "put the gripper into the hole",
    "handle-press-side-v3": "press the handle down from the side",
    "handle-press-v3": "press the handle down",
    "handle-pull-side-v3": "pull the handle up from the side",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "pull the lever up",
    "peg-insert-side-v3": "push the peg into the hole in the side",
    "peg-unplug-side-v3": "pull the peg out of the hole in the side",
    "pick-out-of-hole-v3": "lift the puck out of the hole",
    "pick-place-v3": "pick up the puck and bring it to the goal",
    "pick-place-wall-v3": "lift the puck over the wall and bring it to the goal",
    "plate-slide-back-side-v3": "slide the plate out of the cabinet sideways",
    "plate-slide-back-v3": "slide the plate back out of the cabinet",
    "plate-slide-side-v3": "slide the plate into the cabinet sideways",
    "plate-slide-v3": "slide the plate into the cabinet",
    "push-back-v3": "pull the puck back to the goal",
    "push-v3": "push the puck to the goal",
    "push-wall-v3": "push the puck around the wall to the goal",
    "reach-v3": "move the gripper to the goal",
    "reach-wall-v3": "move the gripper past the wall to the goal",
    "shelf-place-v3": "put the puck on the shelf",
    "soccer-v3": "kick the ball into the net",
    "stick-pull-v3": "take the stick and pull the box with it",
    "stick-push-v3": "take the stick and push the box with it",
    "sweep-into-v3": "sweep the puck into the hole",
    "sweep-v3": "sweep the puck off the table",
    "window-close-v3": "slide the window shut",
    "window-open-v3": "slide the window open",
}
"""Task -> instruction. Own words; a checkpoint that was trained with others gets them through `instructions_file`."""

_MEDIUM = (
    "basketball", "bin-picking", "box-close", "coffee-pull", "coffee-push", "hammer", "peg-insert-side", "push-wall",
    "soccer", "sweep", "sweep-into",
)  # fmt: skip
_HARD = ("assembly", "hand-insert", "pick-out-of-hole", "pick-place", "push", "push-back")
_VERY_HARD = ("shelf-place", "disassemble", "stick-pull", "stick-push", "pick-place-wall")
_MT10 = (
    "reach", "push", "pick-place", "door-open", "drawer-open", "drawer-close", "button-press-topdown",
    "peg-insert-side", "window-open", "window-close",
)  # fmt: skip


def _tasks(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{name}-v3" for name in names)


SUITES: dict[str, tuple[str, ...]] = {
    "easy": tuple(task for task in INSTRUCTIONS if task[:-3] not in _MEDIUM + _HARD + _VERY_HARD),
    "medium": _tasks(_MEDIUM),
    "hard": _tasks(_HARD),
    "very_hard": _tasks(_VERY_HARD),
    "mt10": _tasks(_MT10),
    "mt50": tuple(INSTRUCTIONS),
}
"""Name of a group -> its tasks."""
