"""What runs inside an engine: the agent thread and the training thread. May import torch, never widgets."""
