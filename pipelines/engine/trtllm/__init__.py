"""What both TensorRT-LLM targets share: flags of a release, rules of its kernels, command lines, records of a build."""
