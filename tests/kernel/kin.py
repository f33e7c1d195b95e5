"""Parents and their children without sandboxes: a client's key, a fleet's cards, two nodes, and what admission says.

Called by the tests of child jobs. A parent is claimed for real, by the store's own scripts; only its run is not.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field

from redis.asyncio import Redis

from node_agent.admission import Admitted, Denial, Enforcement, Offer, Rules, admit
from node_agent.kernel.caller import Caller
from node_agent.kernel.children import Children
from node_agent.policy import Policy, parse
from node_agent.records import Notary
from node_agent.turns import Claim
from runner import trust
from runner.scripts import payload
from runner.scripts.payload import JobData, Link
from runner.signing import Signer
from runner.wire import record
from runner.wire import spec as specs
from runner.wire.card import NodeCard, TrustedKey
from runner.wire.derived import Child
from runner.wire.envelope import Domain
from runner.wire.grants import Grants
from runner.wire.spec import JobSpec
from tests.agent import build
from tests.kernel import rig

__all__ = ["ALLOW_ALL", "FAR_MS", "Kin", "child", "linked", "parent"]

ALLOW_ALL = parse(
    'version = 1\n[[allow]]\ncommands = ["*"]\ntasks = ["*"]\nsecrets = ["*"]\nnet = ["*"]\nread = ["*"]\n'
    'write = ["*"]\ntools = ["*"]\nmail = ["*"]\nagents = ["*"]\nwatch = ["*"]\nstate = "1G"\nspawn = 1000\n'
    "unix = true\nservice = true\n"
)
FAR_MS = time.time_ns() // 1_000_000 + 86_400_000


def parent(**changes: object) -> JobSpec:
    """A job that may start five others and holds one of most things."""
    changes.setdefault("grants", Grants(spawn=5))
    changes.setdefault("not_after_ms", FAR_MS)
    return build.job(**changes)


@dataclass(slots=True)
class Kin:
    """A client's key, a fleet's key, and the keys and cards of nodes n1 and n2."""

    client: Signer = field(default_factory=build.signer)
    fleet: Signer = field(default_factory=build.signer)
    nodes: dict[str, Signer] = field(default_factory=lambda: {name: build.signer() for name in ("n1", "n2")})

    def card(self, node: str = "n1", **changes: object) -> bytes:
        """The card of a node, signed by the fleet's key."""
        card = NodeCard(node, self.nodes[node].public, "A", FAR_MS)
        return trust.pack_card(self.fleet, dataclasses.replace(card, **changes))  # type: ignore[arg-type] # tests name real fields

    def sign(self, spec: JobSpec) -> JobData:
        """A job as the client stores it."""
        return JobData(*build.envelope(self.client, spec))

    def link(self, child: Child, node: str = "n1", **card: object) -> Link:
        """What a node adds to a job for a child of it."""
        data = record.dumps(child, bare=True)
        return Link(data, self.nodes[node].sign(Domain.CHILD, data), self.card(node, **card))

    def judge(
        self, found: JobData, spec: JobSpec, *, node: str = "n2", policy: Policy = ALLOW_ALL, **rules: object
    ) -> Admitted | Denial:
        """What another node's admission says of a stored job."""
        key = TrustedKey(self.client.key_id, self.client.public, ("enqueue",), ("*",))
        base = Rules(node, {key.id: key}, policy, Enforcement("A"), ("app",), {}, self.fleet.public)
        offer = Offer(spec.id, specs.lane_of(spec), 1, found.envelope, found.signature, specs.flow_of(spec))
        offer = dataclasses.replace(offer, occurrence=found.occurrence, links=found.links)
        judged = dataclasses.replace(base, **rules)  # type: ignore[arg-type] # tests name real fields
        return admit(offer, judged, lambda _nonce, _attempt: "new", time.time_ns() // 1_000_000)

    def children(self, redis: Redis, claim: Claim, boot: str, **changes: object) -> Children:
        """The part that starts jobs, on node n1."""
        del claim
        notary = Notary(self.nodes["n1"], "n1", boot, "A")
        stands = rig.around(redis, notary=notary, card=self.card("n1"), fleet=self.fleet.public, **changes)
        return Children(stands)

    def caller(self, claim: Claim, spec: JobSpec) -> Caller:
        """A session of the claimed parent."""
        found = rig.caller(spec, attempt=claim.attempt)
        found.run.slot = claim.slot
        found.run.envelope_sha256 = payload.parse(claim.data).sha256
        return found


def linked(found: JobData, *links: Link) -> JobData:
    """The stored form of a child."""
    return dataclasses.replace(found, links=(*found.links, *links))


def child(of: JobSpec, **changes: object) -> Child:
    """What a parent asks for one child: its own program with other words."""
    base = Child(of.id, 1, "n1", 0, argv=of.argv, task=of.task)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type] # tests name real fields
