"""The Hugging Face side: configurations, models and processors. Knows nothing of reinforcement learning."""
