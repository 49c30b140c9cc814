"""The host that computes: adapters of many tenants trained and sampled over one base model."""
