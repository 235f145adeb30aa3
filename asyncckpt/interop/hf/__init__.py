"""`asyncckpt.export_hf`: a model as `from_pretrained` opens it, with config, generation config and tokenizer.

`export` is the function, `config_files` makes the files beside the weights, `model_outline` is what is known of a
model, `architectures` has the rules by which the hub's tensors are made of those in memory. Weights are
written by `interop.convert`. Nothing here imports transformers.
"""
