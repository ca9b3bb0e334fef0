"""The methods: Dis-PFL and the paper's baselines, one file each, on the interface of `base`."""
