"""What users set of data, adapters, ranks and whole runs: checked, without importing torch."""
