"""The codes of what is told as a warning or an error while a job runs, in the order of numbers."""

from __future__ import annotations

from keepstep.codes.code import warning

WARNINGS = (
    # what is protected
    warning(
        "KS5000",
        "caveat",
        means="The program does something that keepstep cannot protect. Training goes on.",
        do="The message says what to write instead.",
        read="assumptions.md#the-training",
    ),
    warning(
        "KS5001",
        "caveat",
        "the program draws from a DataLoader that keepstep does not know",
        means="After a restart that loader would begin its data anew.",
        do="Take the batches from job.loader(dataloader), or call job.places_own_data().",
        read="data.md#a-loader-that-keepstep-does-not-know",
    ),
    warning(
        "KS5002",
        "caveat",
        "regroups its gradient buckets",
        means="With more than two ranks DDP adds gradients in another order in a process's first "
        "backward pass. That is made up for, but not with mixed precision in DDP or delayed sums: "
        "there a resumed run may differ in the last bits.",
        do="find_unused_parameters=True where the last bit matters; else nothing.",
        read="assumptions.md#the-training",
    ),
    warning(
        "KS5003",
        "caveat",
        "a restart will refuse this state",
        "the state has taken in what a new process does not know",
        means="The state holds a type that a new process does not know when it begins, and what is "
        "unknown is refused.",
        do="Set KEEPSTEP_TRUSTED_TYPES as the message says.",
        read="security.md#bytes-never-run-code",
    ),
    warning(
        "KS5004",
        "caveat",
        "what was saved holds",
        means="An option of an optimizer or schedule was edited in the program, and the saved "
        "value has been loaded over it.",
        do="Set it after protect(), or start over with KEEPSTEP_FRESH=1.",
        read="assumptions.md#the-training",
    ),
    warning(
        "KS5005",
        "caveat",
        "is copied at the step's boundary from now on",
        means="An optimizer updates where no hook is called, so the copy cannot go on beside it.",
        do="Nothing; the wait disappears without CUDA graphs and with capturable=False.",
        read="gpu.md#what-a-rank-with-cuda-tensors-does",
    ),
    warning(
        "KS5006",
        "caveat",
        "is not measured",
        means="There was no memory for the page on which a rank's own work is told. Slow ranks are "
        "not named.",
        do="Room in the arena.",
        read="detection.md#slow-ranks",
    ),
    warning(
        "KS5007",
        "caveat",
        "the process that stands by cannot build",
        means="What the process that stands by was to build ahead could not be built. A lost rank "
        "is replaced all the same, and builds its model then.",
        do="Mend the function that `prebuild` names; the reason is in the message.",
        read="operations.md#when-a-rank-dies",
    ),
    warning(
        "KS5008",
        "restore-remark",
        means="Something to know about what was loaded, such as a random state of a device that is "
        "not here.",
        do="The message says it; bits may differ from an undisturbed run in that respect.",
        read="assumptions.md#the-training",
    ),
    warning(
        "KS5009",
        "nothing-left",
        means="An earlier run has done all the steps that the program asks for.",
        do="More steps, or --fresh to start over.",
        read="operations.md#settings",
    ),
    warning(
        "KS5010",
        "damaged",
        means="A snapshot at rest is not what it was. It is never loaded; a copy mends it where "
        "there is one.",
        do="Nothing for the first time; a machine that is named twice has bad memory.",
        read="protocol.md#scrubbing-and-mending",
    ),
    warning(
        "KS5011",
        "capture-failed",
        means="One snapshot was lost. The next step is captured again.",
        do="Nothing for one; the reason is in the message.",
        read="architecture.md#a-steps-way",
    ),
    warning(
        "KS5012",
        "slot-refused",
        means="One more slot was wanted and there is no memory for it, so some steps are skipped.",
        do="Room in the arena, or a link or store that frees slots sooner.",
        read="operations.md#memory",
    ),
    warning(
        "KS5013",
        "slot-unlocked",
        means="CUDA does not page-lock a slot, so copies from the device take longer.",
        do="A higher limit of locked memory (ulimit -l).",
        read="gpu.md#what-a-rank-with-cuda-tensors-does",
    ),
    warning(
        "KS5014",
        "copies-needed",
        means="With one slot nothing is captured until another node has memory for the copy.",
        do="Memory on that node, or slots=2.",
        read="operations.md#memory",
    ),
    warning(
        "KS5015",
        "not-shared",
        means="Replicas keep a snapshot each, since sharing one was not safe.",
        do="Nothing but memory is lost; the reason is in the message.",
        read="operations.md#one-snapshot-among-replicas",
    ),
    warning(
        "KS5016",
        "condemned",
        means="A state is not resumed from any more: it is wrong, or may be.",
        do="Nothing: all go back to a state before it.",
        read="numbers.md#what-is-done",
    ),
    warning(
        "KS5017",
        "last-step-waits",
        means="The last step is captured when a slot is free; the end of the program waits for it.",
        do="Nothing.",
        read="operations.md#memory",
    ),
    # checkpoints
    warning(
        "KS5100",
        "not-stored",
        means="A checkpoint could not be written. Training goes on, and memory is still protected.",
        do="The reason is in the message: credentials, room, or a server that is away. The same "
        "reason is told again after 10, 100, ... times.",
        read="operations.md#checkpoints-on-demand",
    ),
    warning(
        "KS5101",
        "persist-late",
        means="Checkpoints take longer than the steps between them, so some are left out.",
        do="Raise persist_every_steps, or a faster store.",
        read="configuration.md#checkpoints-in-a-store",
    ),
    warning(
        "KS5102",
        "no-loss",
        means="keep has a rule best:loss, and no loss is reported, so it keeps nothing.",
        do="job.report(loss=loss) in every step.",
        read="configuration.md#checkpoints-in-a-store",
    ),
    warning(
        "KS5103",
        "persister-stuck",
        means="The process that writes checkpoints stands still: the store hangs. It is ended and "
        "another one begins.",
        do="Look at the store or the network to it.",
        read="operations.md#checkpoints-on-demand",
    ),
    warning(
        "KS5104",
        "store-unreachable",
        means="The store does not answer, and nobody starts before it does: a newer checkpoint may "
        "be there.",
        do="Nothing yet: it is asked for 300 s. Then the job ends with an error and keeps all.",
        read="operations.md#settings",
    ),
    warning(
        "KS5105",
        "no-metrics",
        means="metrics_port is set in a process that no agent started, so nobody serves metrics.",
        do="keepstep run, which does.",
        read="operations.md#metrics",
    ),
    warning(
        "KS5106",
        "mark-failed",
        means="A tracker (W&B, TensorBoard, MLflow) did not take the mark of an incident.",
        do="The reason is in the message; the training is not touched.",
        read="integrations/incidents.md",
    ),
    # the job and its nodes
    warning(
        "KS5200",
        "agent-restarted",
        means="An agent was killed and another one has taken over. What it had started is ended, "
        "and the ranks begin again from memory.",
        do="Find out who killed it: the kernel's log, where memory was short.",
        read="architecture.md#processes",
    ),
    warning(
        "KS5201",
        "agent-died",
        means="The supervisor saw its agent die or stand still, and starts another one; after "
        "three short lives it gives up.",
        do="Find out who killed it: the kernel's log, where memory was short.",
        read="architecture.md#processes",
    ),
    warning(
        "KS5202",
        "anew",
        means="A rank was lost, and all are started again. The message says why, and from where.",
        do="Nothing; `keepstep explain` tells it in full.",
        read="operations.md#when-a-rank-dies",
    ),
    warning(
        "KS5203",
        "rank-exited",
        means="A rank's process has ended with an error or a signal.",
        do="The line says how; its own output, above, why.",
        read="operations.md#when-a-rank-dies",
    ),
    warning(
        "KS5204",
        "late-death",
        means="A rank was killed after its training had ended well. Nothing is lost.",
        do="Nothing.",
        read="operations.md#when-a-rank-dies",
    ),
    warning(
        "KS5205",
        "lost-notice",
        means="A rank hears that another one is lost; its step is given up and done again.",
        do="Nothing.",
        read="operations.md#when-a-rank-dies",
    ),
    warning(
        "KS5206",
        "refused",
        means="A cheaper way to recover was not safe or not possible, and the next one is taken.",
        do="Nothing; the reason is in the message.",
        read="operations.md#when-a-rank-dies",
    ),
    warning(
        "KS5207",
        "recurrence",
        means="The same failure has come again, which points at the program, the data or a device.",
        do="Look at what the message names before a third time.",
        read="detection.md#the-program-or-the-hardware",
    ),
    warning(
        "KS5208",
        "stopping",
        means="The ranks are told to end.",
        do="Nothing; memory stays for grace_s.",
        read="operations.md#budgets",
    ),
    warning(
        "KS5209",
        "job-ended",
        means="The job has ended with an error; memory is kept for grace_s.",
        do="`keepstep explain`, then the same command again.",
        read="operations.md#exit-code-70",
    ),
    warning(
        "KS5210",
        "memory-removed",
        means="Somebody has removed the job's directory while it trains, so nothing is protected.",
        do="Start the command again. systemd's RemoveIPC and cleaners of /dev/shm do such things.",
        read="operations.md#memory",
    ),
    warning(
        "KS5211",
        "waiting",
        means="A rank waits for the others to ask where to resume.",
        do="`keepstep status` says who is missing.",
        read="operations.md#what-happened-and-why",
    ),
    warning(
        "KS5212",
        "nodes-awaited",
        means="The attempt waits for more nodes.",
        do="Start the command on the nodes that are missing.",
        read="operations.md#several-nodes",
    ),
    warning(
        "KS5213",
        "attempt-closed",
        means="The attempt begins with fewer nodes than it could have.",
        do="Nothing; a node that comes later joins the next attempt.",
        read="operations.md#several-nodes",
    ),
    warning(
        "KS5214",
        "meeting-lost",
        means="The place where agents meet is lost. Ranks train on.",
        do="Its host, or another machine of that name, takes its place; with etcd no node is "
        "special.",
        read="operations.md#several-nodes",
    ),
    warning(
        "KS5215",
        "coordinator-left",
        means="This agent no longer takes part in coordinating; another one does.",
        do="Nothing.",
        read="protocol.md#who-coordinates-leadership-and-fencing",
    ),
    warning(
        "KS5216",
        "order-refused",
        means="An order of a coordinator came too late, and another one leads.",
        do="Nothing.",
        read="protocol.md#who-coordinates-leadership-and-fencing",
    ),
    warning(
        "KS5217",
        "keeper-missing",
        means="No keeper can be started or reached: steps are not protected by this node.",
        do="The log that the message names; often no memory or no descriptors are left.",
        read="architecture.md#processes",
    ),
    warning(
        "KS5218",
        "keeper-restarted",
        means="The keeper has died and another one has taken its place. Snapshots outlive it.",
        do="Nothing for one; the kernel's log, where it comes again.",
        read="architecture.md#processes",
    ),
    warning(
        "KS5219",
        "keeper-unheard",
        means="The new keeper cannot listen where the one before it did, so other nodes have to be "
        "told anew.",
        do="Nothing; the next attempt mends it.",
        read="architecture.md#processes",
    ),
    warning(
        "KS5220",
        "keeper-stuck",
        means="A keeper that did not answer was ended; another one takes its place.",
        do="Nothing for one; a machine without free cores or memory, where it comes again.",
        read="architecture.md#processes",
    ),
    warning(
        "KS5221",
        "not-understood",
        means="The other side could not read a message: another release of keepstep, or a "
        "stranger.",
        do="The same version on every node.",
        read="protocol.md#the-wire",
    ),
    warning(
        "KS5222",
        "no-secret",
        means="Whoever reaches the meeting point can read, stop or join the job.",
        do="Set KEEPSTEP_SECRET to the same random text on every node.",
        read="security.md#who-can-do-what",
    ),
    warning(
        "KS5223",
        "stranger-refused",
        means="Another user's process, or a word without the job's secret, was refused.",
        do="Where nobody attacks: the same KEEPSTEP_SECRET on every node.",
        read="security.md#who-can-do-what",
    ),
    warning(
        "KS5224",
        "dashboard-missing",
        means="An agent that follows another one cannot serve the page at the same address.",
        do="`keepstep dashboard` shows the same from the journals.",
        read="dashboard.md",
    ),
    warning(
        "KS5225",
        "journal-lost",
        means="The journal, or the keeper's log beside it, cannot be written: the disk is full or "
        "takes nothing, or another user has put something in its place. Training is not touched, "
        "but `keepstep explain` will not know of it.",
        do="Room in the state directory; a state directory of your own.",
        read="operations.md#what-happened-and-why",
    ),
    warning(
        "KS5226",
        "message-refused",
        means="A message could not be read, and was not acted upon.",
        do="The message says from whom it came. One of another version of keepstep, or of a "
        "program that is not keepstep's.",
        read="security.md",
    ),
    warning(
        "KS5227",
        "left-ranks-ended",
        means="keepstep run of this job was killed earlier, and its processes went on without it. "
        "The same command has ended them; rank 0 says what its ranks start with.",
        do="Nothing. Find out who killed keepstep run, if it was not you.",
        read="architecture.md#processes",
    ),
    warning(
        "KS5228",
        "blocks-unsigned",
        means="States cross between nodes under checksums alone: they tell an accident, and not a "
        "change that somebody on the way has made.",
        do="pip install 'keepstep[secure]' on every node, or KEEPSTEP_BLOCK_MAC=off where nobody "
        "else reaches the network between them.",
        read="security.md#who-can-do-what",
    ),
    warning(
        "KS5229",
        "recovered",
        means="A rank was lost (KS5231 told why), others stayed, and all train on.",
        do="Nothing; `keepstep explain` tells it in full.",
        read="operations.md#when-a-rank-dies",
    ),
    warning(
        "KS5230",
        "option-unheard",
        means="The program sets an option in code that the agents of `keepstep run` read. They "
        "began before the program did: what they were told then is in effect there.",
        do="Give it to `keepstep run`, or set its variable, as the message says.",
        read="configuration.md",
    ),
    warning(
        "KS5231",
        "plan",
        means="A rank was lost. A process takes its place, and the others wait in theirs for it.",
        do="Nothing: KS5229 says when all train on.",
        read="operations.md#when-a-rank-dies",
    ),
    # ranks that hang, are slow, or compute wrong
    warning(
        "KS5300",
        "suspicion",
        means="A rank seems to make no progress. Nobody is ended yet.",
        do="Nothing: it goes on, or a diagnosis names the culprit.",
        read="detection.md#fact-suspicion-verdict-action",
    ),
    warning(
        "KS5301",
        "diagnosis",
        means="What is wrong, with which rank, and how that is known.",
        do="`keepstep explain`; the stacks of all ranks are saved beside the journal.",
        read="detection.md#fact-suspicion-verdict-action",
    ),
    warning(
        "KS5302",
        "stacks",
        means="The stacks of the ranks could not be saved.",
        do="pip install 'keepstep[stacks]', and the right to trace own processes.",
        read="detection.md#stacks",
    ),
    warning(
        "KS5303",
        "slow-rank",
        means="A rank needs more for its steps than its peers. The message names the section and, "
        "where it is known, the cause.",
        do="Look at that machine: other load, heat, memory; `keepstep preflight` measures it.",
        read="detection.md#slow-ranks",
    ),
    warning(
        "KS5304",
        "device-release",
        means="A rank's device is not free of what waits for a lost peer, so it cannot stay in its "
        "process.",
        do="Nothing: all ranks start anew from memory.",
        read="gpu.md#groups-over-nccl-there-hardly-tested-behind-a-switch",
    ),
    warning(
        "KS5310",
        "wrong-numbers",
        means="A step's gradients, loss or state are not finite, or far beyond all before.",
        do="Nothing: the step is run again, and the culprit is named.",
        read="numbers.md",
    ),
    warning(
        "KS5311",
        "run-again",
        means="A step whose numbers are wrong is taken back on all ranks and run again.",
        do="Nothing.",
        read="numbers.md#what-is-done",
    ),
    warning(
        "KS5312",
        "numbers-judged",
        means="What is at fault for a step's wrong numbers: the program, the batch or a device.",
        do="Look at what is named.",
        read="numbers.md#what-is-named",
    ),
    warning(
        "KS5313",
        "batch-skipped",
        means="The batches of a step made its numbers wrong whoever computed them, and are left "
        "out by all.",
        do="Look at the batches; `wrong_numbers` says stop where you want to decide.",
        read="numbers.md#what-is-done",
    ),
    warning(
        "KS5314",
        "soft-error",
        means="A device has computed wrong for a while, and right when asked again.",
        do="Nothing for one.",
        read="numbers.md#what-is-named",
    ),
    warning(
        "KS5315",
        "device-ageing",
        means="A device computes wrong more often than chance allows.",
        do="Have it replaced.",
        read="numbers.md#what-is-named",
    ),
    warning(
        "KS5320",
        "replicas-differ",
        means="What must be equal on several ranks is not: silent corruption. The rank that is "
        "wrong is named where a majority can tell.",
        do="on_difference=rollback to have all go back; look at that device.",
        read="detection.md#wrong-numbers-that-nobody-reports",
    ),
    warning(
        "KS5321",
        "gradient-differs",
        means="A rank's own gradient is not what another rank finds: silent corruption.",
        do="Nothing for the first time: the step is done again. Look at a device named twice.",
        read="detection.md#wrong-numbers-that-nobody-reports",
    ),
    warning(
        "KS5322",
        "not-repeatable",
        means="What is computed again comes to other bits, so nobody is accused by bits alone: the "
        "message says what is compared all the same, and how far apart it may be.",
        do="Deterministic algorithms, where you want the comparison.",
        read="detection.md#wrong-numbers-that-nobody-reports",
    ),
    warning(
        "KS5323",
        "slow-link",
        means="Copies between these nodes go more slowly than they did. Training waits for copies "
        "only when they take longer than a step; redundancy is late meanwhile.",
        do="Look at the NIC, cable or switch that the message names; counters of lost and resent "
        "packets stand beside it.",
        read="detection.md#slow-links",
    ),
    warning(
        "KS5324",
        "probes-lost",
        means="The process that probes the machine's parts has ended or is silent. What parts are "
        "like is unknown until it is back; training goes on.",
        do="Nothing: it is started again. The reason is in the message.",
        read="detection.md#sick-parts",
    ),
    warning(
        "KS5325",
        "rebalanced",
        means="Ranks share a step's micro-batches otherwise than before, by how fast they are. The "
        "global batch stays as it is.",
        do="Look at the rank that has less: it is slow.",
        read="detection.md#slow-ranks",
    ),
    warning(
        "KS5326",
        "left-out",
        means="The program takes its gradients from `job.partial_sum`, and a rank came to a step's "
        "sum when it was closed. The mean is that of the others; what the rank has computed is "
        "dropped, or added in the next step. Told the first time, and at every doubling.",
        do="Look at the rank: it is slow. `wait_s` waits longer for it. `partial-sums.jsonl`, "
        "beside the journal, says of each step who is in it.",
        read="operations.md#slow-ranks",
    ),
    warning(
        "KS5327",
        "link-damages",
        means="Blocks or messages from that node did not prove when they came. None is believed; "
        "they are sent again, and copies are late, or are given up.",
        do="Look at the network between the two: NIC, cable, switch, and whatever stands in "
        "between and changes bytes.",
        read="detection.md#slow-links",
    ),
    warning(
        "KS5328",
        "link-unknown",
        means="Nobody can tell of some link whether it is slow: how fast copies go varies too "
        "much, a node tells nothing of its copies any more, or what judges the links does not see "
        "a slow one that is planted. Training goes on.",
        do="On a node that is silent look at its keeper (`keepstep status`); a judge that is blind "
        "is a fault of keepstep: report it. Noise passes, or the network is shared.",
        read="detection.md#slow-links",
    ),
)
