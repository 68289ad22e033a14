"""The parts of examples/optical_flow.py: frames, the estimation, and the picture of a flow."""
