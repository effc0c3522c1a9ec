"""What transformer blocks and autoencoders are made of: residual streams, feed-forwards, MLPs."""
