"""Object stores, where a run leaves its files if ``output_dir`` is a URL."""
