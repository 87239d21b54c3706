"""Communication between ranks that layers call: collectives, sequence and context parallelism."""
