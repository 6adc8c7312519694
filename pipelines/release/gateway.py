"""A gateway that splits by the plan: HAProxy, which can compute the plan's own hash. Pure.

It logs every request as a line that `quantgate canary check` reads, without scores.
"""

from __future__ import annotations

from pipelines.decide.rollout import Plan

NAME = "haproxy.cfg"
USER_HEADER = "x-user-id"
CONTROL, CANARY, LISTEN = "127.0.0.1:8001", "127.0.0.1:8002", "127.0.0.1:8000"
_LINE = (
    '{"arm": "%[var(txn.arm)]", "user": %[var(txn.named)], "request_id": "%ID", "e2e_ms": %Ta, '
    '"error": %[var(txn.error)], "at": "%[date,utime(%Y-%m-%dT%H:%M:%SZ)]"}'
)


def haproxy(plan: Plan) -> str:
    """Write the configuration; the step is an environment variable, so that a reload is all that it takes."""
    steps = "\n".join(
        f"#   step {s.step}, {s.percent:g}%: CANARY_BUCKETS={s.buckets} haproxy -f {NAME}" for s in plan.steps
    )
    split = f'str("{plan.split.salt}:"),concat(,txn.user),sha2(256),bytes(0,4),be2dec(,4),mod({plan.split.buckets})'
    named = f'"\\"%[req.fhdr({USER_HEADER}),json(utf8s)]\\"" if {{ req.fhdr({USER_HEADER}) -m found }}'
    return f"""# Rollout of {plan.canary.label} (version {plan.canary.version} of {plan.model}); written by quantgate
# The canary gets users whose bucket is below CANARY_BUCKETS; a bucket is the
# {plan.split.formula}.
{steps}
# A request without {USER_HEADER} has the bucket of the empty user; take the header from what you authenticate, not from
# the client. Addresses are examples: control and canary are the servers of two bundles (`quantgate bundle`).
global
    maxconn 1000
    presetenv CANARY_BUCKETS {plan.steps[0].buckets}
    log stdout format raw local0

defaults
    mode http
    log global
    option dontlognull
    timeout connect 5s
    timeout client 300s
    timeout server 300s

frontend llm
    bind {LISTEN}
    unique-id-format %{{+X}}o%ci-%cp-%Ts-%rt-%pid
    http-request set-var(txn.user) req.fhdr({USER_HEADER})
    http-request set-var(txn.named) str(null)
    http-request set-var-fmt(txn.named) {named}
    http-request set-var(txn.bucket) {split}
    http-request set-var(txn.arm) str(control)
    http-request set-var(txn.arm) str(canary) if {{ var(txn.bucket) -m int lt "${{CANARY_BUCKETS}}" }}
    http-request set-var(txn.error) str(true)
    http-after-response set-var(txn.error) str(false) if {{ status lt 500 }}
    http-after-response set-header x-rollout-arm %[var(txn.arm)]
    use_backend canary if {{ var(txn.arm) -m str canary }}
    default_backend control
    log-format '{_LINE}'

backend control
    server control {CONTROL}

backend canary
    server canary {CANARY}
"""
