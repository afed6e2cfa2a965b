"""The copies of all roles on a rank: engines, versions, reallocations, host memory, exports."""
