"""The codes of errors that the world and the saved state raise, in the order of their numbers."""

from __future__ import annotations

from keepstep.codes.code import error

MET = (
    # memory
    error(
        "KS2000",
        "MemoryBudgetError",
        means="A snapshot's memory cannot be made.",
        do="The message has the numbers: a larger arena, fewer slots or copies, or sharded state.",
        read="operations.md#memory",
    ),
    error(
        "KS2001",
        "MemoryBudgetError",
        "the slots do not fit",
        means="All slots together need more than is free, which was found before anything was "
        "made.",
        do="A larger /dev/shm (in a container --shm-size), fewer copies, or sharded state.",
        read="operations.md#memory",
    ),
    error(
        "KS2002",
        "MemoryBudgetError",
        "the largest this process may write is smaller",
        means="The shell or the service that started the training limits the size of files.",
        do="ulimit -f unlimited, or LimitFSIZE=infinity of the service.",
        read="operations.md#is-this-machine-fit",
    ),
    error(
        "KS2003",
        "MemoryBudgetError",
        "a file of",
        means="The file system of the arena is smaller than one slot, or full.",
        do="A larger /dev/shm, or an arena_dir on a tmpfs with room. `keepstep clean` lists what "
        "killed jobs left there.",
        read="operations.md#memory",
    ),
    # whose it is
    error(
        "KS2100",
        "IdentityError",
        means="The bytes belong to another job, user, rank or epoch, and are not loaded.",
        do="Give each job a name of its own; `keepstep inspect` shows whose a slot is.",
        read="security.md#who-can-do-what",
    ),
    error(
        "KS2101",
        "IdentityError",
        "expected the checkpoints of job",
        means="The store belongs to another job. Nothing there was loaded or removed.",
        do="A store for each job; --job and the old name if it is the same one; --adopt once to go "
        "on from the other's.",
        read="operations.md#settings",
    ),
    error(
        "KS2102",
        "IdentityError",
        "expected to be the only `keepstep run`",
        "is already running in another process",
        means="Another process trains under this job's name on this node.",
        do="End that one, or give this one another --job.",
        read="operations.md#settings",
    ),
    error(
        "KS2103",
        "IdentityError",
        "expected a directory for its owner alone",
        "expected a directory of user",
        "expected a directory of root or of user",
        "expected a directory, found a link or a file",
        means="Somebody else could read or replace this job's memory, so it is not used.",
        do="Remove that directory, or choose another arena_dir.",
        read="security.md#who-can-do-what",
    ),
    error(
        "KS2104",
        "IdentityError",
        "still at work after their last step",
        means="keepstep run of this job was killed, its ranks have done all their steps without "
        "it, and what the program does after them, an export for one, is not over. A start would "
        "end these processes, so it is refused.",
        do="Wait until they have ended, or end them; then the same command begins another run.",
        read="operations.md#when-a-rank-dies",
    ),
    # the saved state and the program
    error(
        "KS2200",
        "LayoutError",
        means="The saved state and the live program have different shapes. Nothing was loaded and "
        "nothing removed.",
        do="The same program as before, another --job, or --fresh to start over.",
        read="operations.md#settings",
    ),
    error(
        "KS2201",
        "LayoutError",
        "does not fit the program",
        means="The model, the optimizer or a shape has changed since the snapshot. The message "
        "names the first differences, saved and live.",
        do="The same program as before, another --job, or --fresh to start over.",
        read="operations.md#settings",
    ),
    error(
        "KS2202",
        "LayoutError",
        "its load_state_dict does not take what its state_dict gave",
        means="A class of the program's own writes what it cannot read.",
        do="Mend its load_state_dict; the snapshot is kept meanwhile.",
        read="integrations/components.md",
    ),
    error(
        "KS2203",
        "LayoutError",
        "no protected DTensor of this program is on such a mesh",
        "expected shards that make",
        means="The state is sharded over another mesh than the saved one.",
        do="The same mesh as before; another number of ranks resumes from a checkpoint in the "
        "store.",
        read="assumptions.md#the-training",
    ),
    error(
        "KS2210",
        "UntrustedError",
        means="The saved state is not what keepstep writes, or names code that the program's own "
        "state does not use. Nothing of it was loaded, everything is kept.",
        do="If you do not know who wrote it, treat it as hostile. If the type is yours: "
        "KEEPSTEP_TRUSTED_TYPES, as the message says.",
        read="security.md#bytes-never-run-code",
    ),
    # damaged bytes
    error(
        "KS2300",
        "DamageError",
        means="Bytes fail their checksum or are not as they were written. They are never loaded; "
        "the next source is tried by itself.",
        do="Nothing for one such message. If the same machine is named again, look at its memory: "
        "`keepstep preflight`.",
        read="protocol.md#a-slot",
    ),
    error(
        "KS2301",
        "DamageError",
        "signed with this job's secret",
        means="A checkpoint was forged, or written before the job had this secret or under another "
        "one.",
        do="The same KEEPSTEP_SECRET as before; --adopt once if you know who wrote it.",
        read="security.md#what-is-signed-in-the-store",
    ),
    # the keeper
    error(
        "KS3000",
        "KeeperError",
        means="The process that holds this node's memory cannot go on with this rank. The message "
        "says why.",
        do="`keepstep status` and `keepstep explain`; run the same command again.",
        read="architecture.md#processes",
    ),
    error(
        "KS3001",
        "KeeperError",
        "no keeper answered at",
        "no keeper can be started",
        means="The keeper did not start in time, or not at all.",
        do="Read the log that the message names; on a busy machine start again.",
        read="architecture.md#processes",
    ),
    error(
        "KS3002",
        "KeeperError",
        "a rank runs another release of keepstep",
        means="Ranks of one job have different versions installed.",
        do="Install the same version on every node.",
        read="protocol.md#the-wire",
    ),
    error(
        "KS3003",
        "KeeperError",
        "the keeper cannot listen at",
        "does not listen to the keepers of other nodes",
        "host: expected an address of this machine",
        means="Keepers of other nodes cannot reach this one: the address is not this machine's, or "
        "the port is taken.",
        do="Set --host to an address of this machine that the others can reach.",
        read="operations.md#several-nodes",
    ),
    # the store
    error(
        "KS3100",
        "StoreError",
        means="The store could not be read or written. Training and earlier checkpoints are "
        "untouched.",
        do="The reason follows in the message: credentials, room, or a server that is away.",
        read="operations.md#checkpoints-on-demand",
    ),
    error(
        "KS3101",
        "StoreError",
        "could not be persisted",
        means="A checkpoint that was asked for could not be written.",
        do="The reason follows in the message; ask again when it is mended.",
        read="operations.md#checkpoints-on-demand",
    ),
    error(
        "KS3102",
        "StoreError",
        "expected a checkpoint, found none",
        "expected a manifest, found none",
        means="There is no finished checkpoint at that place.",
        do="`keepstep inspect --store` lists what is there, also of the runs before.",
        read="operations.md#reading-checkpoints-without-keepstep",
    ),
    error(
        "KS3110",
        "UnsavedError",
        means="The training has ended, and its last step is not in the store.",
        do="Make room or bring the store back, and run the same command again: memory is kept for "
        "grace_s.",
        read="operations.md#checkpoints-on-demand",
    ),
    # where nodes meet
    error(
        "KS3200",
        "MeetingError",
        means="The nodes could not meet. What is in their memory stays for grace_s.",
        do="The message says who was missing; start the command again on every node.",
        read="operations.md#several-nodes",
    ),
    error(
        "KS3201",
        "MeetingError",
        "--rdzv-endpoint: expected",
        "expected to be able to make a place for the ranks to meet",
        means="Nobody answers at the meeting point, or it cannot be made there.",
        do="The same --rdzv-endpoint on all nodes, a port that is free and that no firewall "
        "closes.",
        read="operations.md#several-nodes",
    ),
    error(
        "KS3202",
        "MeetingError",
        "is gone",
        "are gone",
        means="The machine or the etcd where the nodes met is lost.",
        do="Start the command again; with etcd no node is special.",
        read="operations.md#several-nodes",
    ),
    error(
        "KS3203",
        "MeetingError",
        "where the nodes meet: expected",
        means="What lies at the meeting point was written by another release, or under another "
        "secret.",
        do="The same version and KEEPSTEP_SECRET on every node; a --job of its own.",
        read="security.md#who-can-do-what",
    ),
    # lost ranks and wrong numbers
    error(
        "KS4000",
        "PeerLost",
        means="Another rank is lost, and this program's loop has no `with step:`.",
        do="Nothing: all ranks start anew from memory. To stay in the process: `with step:`.",
        read="operations.md#when-a-rank-dies",
    ),
    error(
        "KS4001",
        "CorruptionError",
        means="This rank's state is not what other ranks have and was to be the same. Its process "
        "ends, so that all go back to the last step at which they agreed.",
        do="Nothing for the first time; look at a device or machine that is named twice.",
        read="detection.md#wrong-numbers-that-nobody-reports",
    ),
    error(
        "KS4002",
        "StoppedError",
        means="Ranks differ that were to be equal, and on_difference says that a person decides.",
        do="`keepstep compare` names the tensors. Start again to go on from memory.",
        read="detection.md#wrong-numbers-that-nobody-reports",
    ),
    error(
        "KS4003",
        "WrongNumbersError",
        means="A step's numbers are wrong each time it is run: the program or its data make them "
        "so.",
        do="Look at the batch and the loss that the message names; memory is of before that step.",
        read="numbers.md",
    ),
    error(
        "KS4004",
        "DeviceError",
        means="This rank's hardware computes wrong numbers where others compute right ones.",
        do="Take that device or machine out; `keepstep preflight` measures it.",
        read="numbers.md#what-is-named",
    ),
)
