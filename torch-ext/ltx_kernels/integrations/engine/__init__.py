"""The ground floor: replaced forwards, guards, snapshots and signatures. It imports none of the other rooms."""
