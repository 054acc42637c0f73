"""Where a step's time goes: recorded here, or by Nsight Systems, by range, with the same names."""
