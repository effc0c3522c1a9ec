"""The base of the integrations: replaced forwards, guards, snapshots and signatures. It imports no other folder."""
