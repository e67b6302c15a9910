"""What several processes do with files: durable writes, locks, secrets, and files under a URL."""
