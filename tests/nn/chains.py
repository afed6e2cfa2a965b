"""What the kernels of TritonChains compute, by the operations of torch."""

import torch

from realhf.nn.mlp import ACTIVATIONS
from realhf.nn.moe import _choose
from realhf.nn.rope import rotate


def add_norm(self, x_TH, y_TH, *, scale, out_norm, norm):
    total_TH = x_TH
    if y_TH is not None:
        total_TH = x_TH + scale * (y_TH if out_norm is None else out_norm(y_TH))
    return total_TH, total_TH if norm is None else norm(total_TH)


def rotate_and_store(self, qkv, *, num_kv_heads, angles, interleaved, norms, place, by_head=True):
    assert qkv.is_contiguous() and not torch.is_grad_enabled()
    q_TND, k_TKD, v_TKD = qkv.split((qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    if norms is not None:
        q_TND, k_TKD = (
            norm(x if by_head else x.flatten(1)).view_as(x)
            for norm, x in zip(norms, (q_TND, k_TKD), strict=True))
    out = torch.cat((q_TND, k_TKD, v_TKD), dim=1)
    if angles is not None:
        out = rotate(out, angles, interleaved=interleaved, num_heads=out.shape[1] - num_kv_heads)
    if place is not None:
        place.write(*out[:, -2 * num_kv_heads :].split(num_kv_heads, dim=1))
    return out


def rotate_latent(self, q_TND, kv_TL, *, norm, angles, interleaved, place):
    assert not torch.is_grad_enabled()
    rank = len(norm.weight)
    q_TNR = q_TND[..., q_TND.shape[2] - (kv_TL.shape[1] - rank) :].clone()
    k_T1R = kv_TL[:, None, rank:].clone()
    if angles is not None:
        q_TNR, k_T1R = (rotate(x, angles, interleaved=interleaved) for x in (q_TNR, k_T1R))
    out_T1L = torch.cat((norm(kv_TL[:, :rank])[:, None], k_T1R), dim=2)
    if place is not None:
        place.write(out_T1L)
    return q_TNR, out_T1L


def angles(self, position_T, frequencies, factor, dtype):
    angles = position_T[:, None, None].to(frequencies.dtype) * frequencies
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def gated(self, up_TF, activation):
    assert up_TF.is_contiguous()
    gate_TF, up_TF = up_TF.chunk(2, dim=1)
    return _function(activation).compute(gate_TF) * up_TF


def gated_backward(self, grad_TF, up_TF, activation):
    assert grad_TF.is_contiguous() and up_TF.is_contiguous()
    gate_TF, up_TF = up_TF.chunk(2, dim=1)
    function = _function(activation)
    activated_TF = function.compute(gate_TF)
    out_TF = torch.cat((function.backward(grad_TF * up_TF, gate_TF), grad_TF * activated_TF), dim=1)
    grad_TF.copy_(activated_TF * up_TF)
    return out_TF


def route(self, logits_TE, moe, bias, dtype):
    wide_TE = logits_TE.float()
    scores_TE = wide_TE.sigmoid() if moe.scores == "sigmoid" else wide_TE.softmax(-1)
    expert_TK = _choose(scores_TE, None if bias is None else bias.float().sum(0), moe)
    weights_TK = scores_TE.gather(1, expert_TK)
    if moe.normalize:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return (weights_TK * moe.scale).to(dtype), expert_TK


def group_rows(self, expert_TK, num_experts):
    expert_R, order_R = expert_TK.flatten().sort(stable=True)
    experts = torch.arange(num_experts, device=expert_TK.device)
    ends = torch.searchsorted(expert_R, experts, right=True, out_int32=True)
    return order_R // expert_TK.shape[1], order_R.argsort(), ends


def mix(self, y_RH, weights_TK, place_R):
    y_TKH = y_RH[place_R].unflatten(0, weights_TK.shape).float()
    weights_TK1 = weights_TK.float()[..., None]
    return torch.where(weights_TK1 == 0, 0, weights_TK1 * y_TKH).sum(1).to(y_RH.dtype)


def logit_statistics(self, product_TV, at_TK, head, temperature, entropy):
    assert product_TV.is_contiguous()
    x_TV = head.to_logits(product_TV, temperature=temperature)
    lse_T1 = x_TV.logsumexp(1, keepdim=True)
    columns = [lse_T1, x_TV.gather(1, at_TK)]
    return torch.cat(columns + ([((x_TV - lse_T1).exp() * x_TV).sum(1, keepdim=True)] if entropy else []), 1)


def logit_gradient(self, product_TV, grad_TK, lse_T, labels, of_entropy, head, temperature):
    """By autograd, of what the kernel differentiates; other ranks' logits are in the log-sum-exp."""
    at_TK, here_TK = labels
    with torch.enable_grad():
        leaf = product_TV.detach().clone().requires_grad_()
        x_TV = head.to_logits(leaf, temperature=temperature)
        weight_TV = (x_TV - lse_T[:, None]).exp()
        total = (x_TV.gather(1, at_TK) * grad_TK * here_TK).sum()
        total = total - (weight_TV.sum(1) * grad_TK.sum(1)).sum()
        if of_entropy is not None:
            entropy_T, grad_T = of_entropy
            logp_TV = x_TV - lse_T[:, None]  # d/dx (p (log p + H - 1)) = p (log p + H)
            total = total - ((weight_TV * (logp_TV + entropy_T[:, None] - 1)).sum(1) * grad_T).sum()
        (grad_TV,) = torch.autograd.grad(total, leaf)
    product_TV.copy_(grad_TV)


def _function(activation):
    return next(function for function in ACTIVATIONS.values() if function.name == activation)


BY_TORCH = {
    function.__name__: function for function in (
        add_norm, rotate_and_store, rotate_latent, angles, gated, gated_backward, route, group_rows, mix,
        logit_statistics, logit_gradient)}
