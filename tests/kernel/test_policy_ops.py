"""The names that policy rules may use are the kernel's own names (row K4's defect)."""

from __future__ import annotations

from node_agent.kernel.desk import parts_of
from node_agent.kernel.table import table_of
from node_agent.policycalls import OPS
from tests.kernel import ledger, rig
from tests.support.valkey import Valkey


def test_k4_policy_knows_every_call_by_the_kernel_s_own_name_and_no_other(valkey: Valkey) -> None:
    """A call that policy does not know could not be denied; a name that is no call would be a void rule."""

    async def main() -> set[str]:
        async with ledger.node(valkey) as on:
            around = rig.around(on.redis, spending=on.budgets, decider=on.deciding)
            return set(table_of(*(part.entries() for part in parts_of(around))))

    assert ledger.run(main()) == OPS
