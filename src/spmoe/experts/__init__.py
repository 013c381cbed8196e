"""Holding and moving experts. Knows nothing of models.

An `Experts` has the parts that the rest of the engine talks to: `access` hands out experts, `scheduler` prefetches
them, `step` follows the step's lifecycle, and `run_ahead` owns what a device was given ahead of the host. All of them
work over one `ExpertPool`.
"""
