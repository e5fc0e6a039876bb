"""OpenVLA and OpenVLA-OFT: configuration, model, loading. Import from the modules, or use `load_vla`."""
