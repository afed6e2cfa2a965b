"""stub"""
_c={}
def num_params(spec, strategy, stage):
    k=id(spec)
    if k not in _c: _c[k]=spec.numel
    return int(_c[k] / strategy.pp / strategy.tp)
def weights_bytes(role, strategy, stage): return num_params(role.spec, strategy, stage) * role.itemsize
def training_bytes(role, strategy, stage): return int(num_params(role.spec, strategy, stage) * (4 + 12 / strategy.dp))
def call_bytes(role, kind, workload, strategy, stage, *, micro_batch_tokens, recompute=False):
    c = role.config
    if kind == "generate":
        rows = min(workload.max_rows, -(-workload.num_samples // strategy.dp))
        return {"kv": rows * (workload.prompt_tokens + workload.max_new_tokens) * 2 * c.head_dim * max(1, c.num_kv_heads // strategy.tp) * role.itemsize * c.num_layers / strategy.pp}
    t = min(micro_batch_tokens, workload.tokens * workload.num_samples)
    if kind == "train_step":
        per = (2 if recompute else 34 / strategy.tp) * c.hidden_size * c.num_layers / strategy.pp
        return {"act": t * per * min(strategy.pp - stage, 8), "logits": t * 4 * 3 * c.vocab_size / strategy.tp}
    return {"act": t * 20 * c.hidden_size, "logits": t * 8 * c.vocab_size / strategy.tp}
def available_bytes(cluster): return cluster.device_memory_bytes * 0.9
