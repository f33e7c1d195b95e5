"""The key table: every Redis key of ours and of RQ that we touch, its type, life and writers.

Called by client, agents and scripts' loaders. Must never be bypassed: a key that is not here has no owner.

    key                      type    life                        written by
    rf:seq                   string  the fleet's                 enqueue.lua (the order of all jobs, cutoffs)
    rf:wake:<lane>           list    60 s, at most 64 items      enqueue.lua, turn.lua, recover.lua
    rf:lanes                 set     an hour empty, beyond 256   enqueue.lua (max 10,000), moves into lanes, due.lua
    rf:clock                 string  the fleet's                 lease scripts; newest Redis TIME seen, ms
    rf:horizon               string  not_after + 7 d             enqueue.lua; latest not_after beyond the usual 7 d, ms
    rf:due                   zset    owner: scheduled jobs       prelude.lua (to_scheduled), due.lua; job, score: due ms
    rf:schedules:<tenant>    hash    owner: the tenant           schedule.lua; name -> "PAUSED SIG SCHEDULE"
    rf:ticks                 zset    owner: schedules            schedule, enqueue; TENANT/NAME, score: next due ms
    rf:leader                hash    the fleet's                 due.lua; member, until (ms), token, lanes (ms)
    rf:leases                zset    owner: boots                lease scripts; member NODE/BOOT, score ms
    rf:claims:<node>/<boot>  hash    owner: the lease            turn, sweep, recover; job -> fence (prelude.lua, hold)
    rf:nodes                 hash    owner: nodes                register.lua, lease.lua; node -> record JSON
    rf:hosts                 hash    owner: nodes                register.lua; node -> id of its machine
    rf:cards                 hash    owner: keys                 agents; node -> signed card
    rf:tomb:<job>            string  not_after + 1 d             kill.lua; "SIG COMMAND"
    rf:doomed                zset    owner: killing jobs         kill.lua; jobs taken from a lane, not signed off yet
    rf:cut, rf:cut:<tenant>  hash    8 d after the newest, or    kill.lua; selector -> "SEQ SIG COMMAND", "#" -> changes
                                     1 d after the horizon
    rf:ctl:<node>, rf:ctl:all stream MINID of expired commands   kill.lua, pause.lua; command, sig, why, job (mend.lua)
    rf:suspended             hash    owner: operators            pause.lua; queue -> "SIG COMMAND" that suspended it
    rf:rep:<command>         stream  1 h                         agents
    rf:ev:<tenant>           stream  ~100,000 entries, 30 d      scripts (sig empty), agents; event, sig
    rf:ev:-nodes             stream  ~100,000 entries, 30 d      agents (node events; "-" is no tenant)
    rf:jev:<job>             stream  ~1,000 entries, 7 d         agents; what the job itself can cause: event, sig
    rf:art:<job>             hash    7 d after the last change   artifacts.py; signed "m:NAME", pieces "GEN:NUMBER"
    rf:anchor:<node>         stream  owner: the node; 14 d each  its agent, which may add only; head, sig
    rf:log:<job>             stream  7 d after the last entry    agents
    rf:act:<tenant>          zset    not_after + 7 d             enqueue.lua; newest 10,000 ids by sequence (for ps)
    rf:named:<tenant>        set     8 d after a new one         enqueue.lua; lanes that it named first, at most 2,500
    rf:uniq:<tenant>:<key>   string  not_after or ttl (+ run)    enqueue.lua, ends; the job that holds the name
    rf:rate:<tenant>:<key>   zset    one period                  turn.lua; JOB.ATTEMPT -> ms of its start
    rf:plan:<tenant>:<key>   zset    last due + period + 10 s    turn.lua; jobs that a rate held back, by sequence
    rf:conc:<tenant>:<key>   set     limit of a run + 30 d       turn.lua, recover.lua; jobs that have a place
    rf:line:<tenant>:<key>   zset    30 d                        turn.lua, recover.lua; jobs that wait for a place
    rf:open:<job>            set     its not_after + 7 d         enqueue.lua, ends; jobs that it still waits for
    rf:then:<job>            set     their not_after + 7 d       enqueue.lua, ends; jobs that wait for it, at most 1,000
    rf:state:<job>           hash    7 d after a change, or      files.lua; its /state: path -> entry, ".fence", …
                                     not_after + wall if later
    rf:statedata:<job>       hash    as rf:state                 files.lua; path -> content
    rf:mem:<tenant>:<agent>  hash    90 d after the last change  files.lua; what a name remembers: path -> entry
    rf:memdata:<tenant>:<agent> hash as rf:mem                   files.lua; path -> content
    rf:kids:<job>            hash    its not_after + 7 d         child.lua; next free number of a child, "n:NAME" -> N
    rf:ask:<job>             hash    the time to decide + 7 d    ask, decide; calls of a job that a person decides on
    rf:asks:<tenant>         zset    the longest of them + 7 d   ask, budget, decide; "JOB ID", "budget KEY" -> ms
    rf:budget:<tenant>:<key> hash    ttl_s after its last use    budget, decide; unit -> used, operators' words
    rf:mail:<tenant>:<box>   stream  8 d after the last letter   mail.lua; a mailbox, topic or (@JOB, 25 h) answers
    rf:box:<tenant>:<box>    hash    8 d after the last letter   mail.lua; bytes, count, who waits (w:), has seen (s:)
    rf:dead:<tenant>:<box>   stream  7 d after the last          mail.lua; letters that nobody took, newest 100
    rf:bell:<node>           stream  1 h, ~1,000 entries         mail.lua, agents; what waits for a node's jobs
    rf:quota:<tenant>:<name> zset    one period, or 20 s         quota.lua; uses of a policy's quota, newest 10,000

RQ's keys keep their names below the same prefix rule (notes: RQ_KEY_PREFIX and one hash tag on a cluster).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["PERMANENT", "Keys"]

#: Patterns of our keys that have an owner instead of a TTL.
PERMANENT: Final = (
    "rf:seq",
    "rf:lanes",
    "rf:clock",
    "rf:due",
    "rf:schedules:*",
    "rf:ticks",
    "rf:leader",
    "rf:leases",
    "rf:claims:*",
    "rf:nodes",
    "rf:hosts",
    "rf:cards",
    "rf:doomed",
    "rf:ctl:*",
    "rf:anchor:*",
    "rf:suspended",
)


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of all keys below one prefix pair. On a cluster both prefixes carry the same hash tag."""

    rq: str = "rq:"
    rf: str = "rf:"

    @classmethod
    def tagged(cls, tag: str) -> Keys:
        """Return the table for a cluster: every key in the slot of ``{tag}``."""
        return cls(rq=f"{{{tag}}}rq:", rf=f"{{{tag}}}rf:")

    def seq(self) -> str:
        """The job counter."""
        return f"{self.rf}seq"

    def wake(self, lane: str) -> str:
        """The lane's wake-up list."""
        return f"{self.rf}wake:{lane}"

    def lanes(self) -> str:
        """Every lane in use; what stays empty is forgotten in time."""
        return f"{self.rf}lanes"

    def due(self) -> str:
        """Scheduled jobs of all lanes by the time they are due."""
        return f"{self.rf}due"

    def schedules(self, tenant: str) -> str:
        """A tenant's schedules by name."""
        return f"{self.rf}schedules:{tenant}"

    def ticks(self) -> str:
        """Every schedule that is not paused by its next due time."""
        return f"{self.rf}ticks"

    def leader(self) -> str:
        """Who enqueues the occurrences of schedules now."""
        return f"{self.rf}leader"

    def leases(self) -> str:
        """Leases of all agent starts."""
        return f"{self.rf}leases"

    def clock(self) -> str:
        """The newest Redis TIME that a lease script saw."""
        return f"{self.rf}clock"

    def claims(self, node: str, boot: str) -> str:
        """Jobs that one agent start holds."""
        return f"{self.rf}claims:{node}/{boot}"

    def nodes(self) -> str:
        """Records of all nodes."""
        return f"{self.rf}nodes"

    def hosts(self) -> str:
        """Which machine holds each node's name."""
        return f"{self.rf}hosts"

    def cards(self) -> str:
        """Signed node cards."""
        return f"{self.rf}cards"

    def tombstone(self, job_id: str) -> str:
        """The kill that a job carries."""
        return f"{self.rf}tomb:{job_id}"

    def doomed(self) -> str:
        """Jobs that a kill took out of a lane and whose end is not signed yet."""
        return f"{self.rf}doomed"

    def cutoffs(self, tenant: str | None = None) -> str:
        """Selector kills: the controllers' table, or one tenant's."""
        return f"{self.rf}cut" if tenant is None else f"{self.rf}cut:{tenant}"

    def control(self, node: str | None = None) -> str:
        """The command stream of one node, or of all."""
        return f"{self.rf}ctl:{node or 'all'}"

    def suspended(self) -> str:
        """Queues that nobody claims from until they are unsuspended."""
        return f"{self.rf}suspended"

    def replies(self, command_id: str) -> str:
        """Answers to one command."""
        return f"{self.rf}rep:{command_id}"

    def events(self, tenant: str | None) -> str:
        """Events of a tenant's jobs, or (None) of nodes."""
        return f"{self.rf}ev:{tenant or '-nodes'}"

    def job_events(self, job_id: str) -> str:
        """Events that a job itself can cause."""
        return f"{self.rf}jev:{job_id}"

    def artifacts(self, job_id: str) -> str:
        """The artifacts of a job and their pieces."""
        return f"{self.rf}art:{job_id}"

    def anchor(self, node: str) -> str:
        """Signed heads of a node's flight record."""
        return f"{self.rf}anchor:{node}"

    def log(self, job_id: str) -> str:
        """A job's captured output."""
        return f"{self.rf}log:{job_id}"

    def named(self, tenant: str) -> str:
        """The lanes that a tenant named first."""
        return f"{self.rf}named:{tenant}"

    def active(self, tenant: str) -> str:
        """Recent jobs of a tenant by sequence number."""
        return f"{self.rf}act:{tenant}"

    def open(self, job_id: str) -> str:
        """The jobs that a job still waits for."""
        return f"{self.rf}open:{job_id}"

    def then(self, job_id: str) -> str:
        """The jobs that wait for a job."""
        return f"{self.rf}then:{job_id}"

    def state(self, job_id: str) -> str:
        """What files a job's /state has."""
        return f"{self.rf}state:{job_id}"

    def state_data(self, job_id: str) -> str:
        """The contents of a job's /state."""
        return f"{self.rf}statedata:{job_id}"

    def memory(self, tenant: str, agent: str) -> str:
        """What files an agent's name remembers."""
        return f"{self.rf}mem:{tenant}:{agent}"

    def memory_data(self, tenant: str, agent: str) -> str:
        """The contents of what an agent's name remembers."""
        return f"{self.rf}memdata:{tenant}:{agent}"

    def kids(self, job_id: str) -> str:
        """What a job knows of the jobs that it started; there is none as long as it started none."""
        return f"{self.rf}kids:{job_id}"

    def ask(self, job_id: str) -> str:
        """The calls of a job that a person decides on."""
        return f"{self.rf}ask:{job_id}"

    def asks(self, tenant: str) -> str:
        """What of a tenant waits for a person."""
        return f"{self.rf}asks:{tenant}"

    def budget(self, tenant: str, key: str) -> str:
        """What the jobs of one budget have used."""
        return f"{self.rf}budget:{tenant}:{key}"

    def quota(self, tenant: str, name: str) -> str:
        """The uses of one quota of the policy."""
        return f"{self.rf}quota:{tenant}:{name}"

    def mail(self, tenant: str, box: str) -> str:
        """A mailbox, topic or box of answers."""
        return f"{self.rf}mail:{tenant}:{box}"

    def box(self, tenant: str, box: str) -> str:
        """What is known of a mailbox besides its letters."""
        return f"{self.rf}box:{tenant}:{box}"

    def dead(self, tenant: str, box: str) -> str:
        """Letters of a mailbox that nobody took."""
        return f"{self.rf}dead:{tenant}:{box}"

    def bell(self, node: str) -> str:
        """What waits for the jobs of a node."""
        return f"{self.rf}bell:{node}"

    def job(self, job_id: str) -> str:
        """RQ's job hash."""
        return f"{self.rq}job:{job_id}"

    def queue(self, lane: str) -> str:
        """RQ's list of waiting ids."""
        return f"{self.rq}queue:{lane}"

    def queues(self) -> str:
        """RQ's set of queue keys."""
        return f"{self.rq}queues"

    def registry(self, kind: str, lane: str) -> str:
        """RQ's registry ``kind`` (wip, finished, failed, canceled, deferred, scheduled) of a lane."""
        return f"{self.rq}{kind}:{lane}"

    def results(self, job_id: str) -> str:
        """RQ's result stream."""
        return f"{self.rq}results:{job_id}"

    def workers(self) -> str:
        """RQ's set of worker keys."""
        return f"{self.rq}workers"

    def worker(self, name: str) -> str:
        """RQ's worker hash."""
        return f"{self.rq}worker:{name}"
