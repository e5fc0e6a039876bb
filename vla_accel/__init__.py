"""Online reinforcement learning for vision-language-action policies, on Hugging Face Accelerate."""

__version__ = "0.1.0"
