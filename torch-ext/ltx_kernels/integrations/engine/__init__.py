"""The ground floor: sites, guards, state, and what a call may keep. It imports none of the other rooms."""
