"""Policy optimisation with a reference and a reward model: rollouts are gathered, a KL penalty adapts, and rank 0 decides."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import broadcast, broadcast_object_list, gather_object, set_seed

TOKENS, LENGTH, UPDATES, TARGET_KL = 8, 5, 4, 0.02


class TokenModel(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 12)
        self.rnn = nn.GRU(12, 12, batch_first=True)
        self.head = nn.Linear(12, outputs)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


def log_probs_of(logits, tokens):
    return logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def generate(model, prompts):
    for _ in range(LENGTH):
        following = torch.multinomial(model(prompts)[:, -1].softmax(-1), 1)
        prompts = torch.cat([prompts, following], dim=1)
    return prompts


def masked_whiten(values):
    return (values - values.mean()) * torch.rsqrt(values.var() + 1e-8)


accelerator = Accelerator(gradient_accumulation_steps=2)
set_seed(4)
policy, value_model, reward_model = TokenModel(TOKENS), TokenModel(1), TokenModel(1)
reference = TokenModel(TOKENS).eval().requires_grad_(False)
reference.load_state_dict(policy.state_dict())
optimizer = torch.optim.Adam([*policy.parameters(), *value_model.parameters()], lr=3e-3)
prompts = DataLoader(torch.randint(0, TOKENS, (32, 3)), batch_size=8, shuffle=True, drop_last=True)
policy, value_model, optimizer, prompts = accelerator.prepare(policy, value_model, optimizer, prompts)
reference, reward_model = reference.to(accelerator.device), reward_model.to(accelerator.device)
set_seed(10, device_specific=True)
kl_weight = torch.tensor([0.1], device=accelerator.device)
result = {"losses": [], "kl": [], "rewards": [], "weights": [], "best": [], "clip_fraction": []}
batches = iter(prompts)
for _ in range(UPDATES):
    try:
        batch = next(batches)
    except StopIteration:
        batches = iter(prompts)
        batch = next(batches)
    with torch.no_grad():
        tokens = generate(accelerator.unwrap_model(policy), batch)
        old = log_probs_of(policy(tokens), tokens)
        kl = old - log_probs_of(reference(tokens), tokens)
        scores = reward_model(tokens)[:, -1, 0]
        values = accelerator.unwrap_model(value_model)(tokens)[:, :-1, 0]
        all_scores = accelerator.gather(scores)
        rewards = (scores - all_scores.mean()) / (all_scores.std() + 1e-6)
        returns = rewards[:, None] - kl_weight * kl.flip(1).cumsum(1).flip(1)
        advantages = masked_whiten(accelerator.gather(returns - values))
        advantages = advantages.chunk(accelerator.num_processes)[accelerator.process_index]
    order = broadcast(torch.randperm(len(tokens), device=accelerator.device), from_process=0)
    for rows in order.chunk(2):
        with accelerator.accumulate(policy, value_model):
            new = log_probs_of(policy(tokens[rows]), tokens[rows])
            ratio = (new - old[rows]).exp()
            clipped = ratio.clamp(0.95, 1.05)
            policy_loss = -torch.min(ratio * advantages[rows], clipped * advantages[rows]).mean()
            value_loss = nn.functional.mse_loss(value_model(tokens[rows])[:, :-1, 0], returns[rows])
            loss = policy_loss + 0.5 * value_loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        clips = (ratio != clipped).float().mean()
        result["losses"].append(accelerator.gather(loss.detach()).mean().item())
        result["clip_fraction"].append(accelerator.reduce(clips, reduction="mean").item())
    mean_kl = accelerator.reduce(kl.sum(1).mean(), reduction="mean")
    kl_weight *= 1.5 if mean_kl > TARGET_KL else 0.75
    kl_weight = broadcast(kl_weight)
    best = gather_object([[scores.max().item(), tokens[scores.argmax()].tolist()]])
    decision = [max(best) if accelerator.is_main_process else None]
    result["best"].append(broadcast_object_list(decision)[0])
    result["kl"].append(mean_kl.item())
    result["rewards"].append(all_scores.mean().item())
    result["weights"].append(kl_weight.item())
accelerator.print(json.dumps(result))
