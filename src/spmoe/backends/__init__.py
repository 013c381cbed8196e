"""The arithmetic of experts, per kind of device."""
