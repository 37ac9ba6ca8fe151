"""Where shards live when they are not on the device that computes: host memory or a disk."""
