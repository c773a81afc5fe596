"""Policies: model families behind one contract."""

from lit_diffrl.policies.base import Conditioning, Policy, Size
from lit_diffrl.policies.lora import LoRA
from lit_diffrl.policies.sd3 import SD3Policy
from lit_diffrl.policies.teachers import Teacher

__all__ = ["Conditioning", "LoRA", "Policy", "SD3Policy", "Size", "Teacher"]
