//! One component: a process with a log file that ends when the test ends.
//!
//! Each runs in a process group of its own (so that Ctrl-C reaches only the test, which then stops them in order) and under
//! `setpriv --pdeathsig KILL`, so that the kernel ends it when the test dies by whatever means. The kernel ties that signal to
//! the *thread* that forked: components are started from the main thread only, which [`Component::start`] checks.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{Read, Seek, SeekFrom, Write},
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    sys::signal::{Signal, killpg},
    unistd::{Pid, getpid, gettid},
};

/// Begins the log's line before each start.
const START: &str = "==== start:";

/// How long a component may take to end by itself before it is killed.
const GRACE: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub struct ProcessSpec {
    /// Name of the component and of its log file.
    pub name: String,
    pub program: PathBuf,
    pub args: Vec<OsString>,
    /// Variables on top of ours.
    pub env: BTreeMap<String, OsString>,
}

impl ProcessSpec {
    pub fn new(name: impl Into<String>, program: impl Into<PathBuf>) -> Self {
        Self { name: name.into(), program: program.into(), args: Vec::new(), env: BTreeMap::new() }
    }

    #[must_use]
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    #[must_use]
    pub fn args<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    #[must_use]
    pub fn flag(self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        let mut text = OsString::from(format!("--{name}="));
        text.push(value);
        self.arg(text)
    }

    #[must_use]
    pub fn env(mut self, name: impl Into<String>, value: impl Into<OsString>) -> Self {
        self.env.insert(name.into(), value.into());
        self
    }

    /// Run with the mounts of another process.
    #[must_use]
    pub fn in_mounts_of(mut self, pid: u32) -> Self {
        let before = [format!("--mount=/proc/{pid}/ns/mnt").into(), "--".into(), self.program.into()];
        self.program = "nsenter".into();
        self.args.splice(0..0, before);
        self
    }

    /// Run in a cgroup, with all its memory from the first page on.
    #[must_use]
    pub fn in_cgroup(mut self, folder: &Path) -> Self {
        let enter = "echo $$ >\"$0\" && exec \"$@\"";
        let before = ["-c".into(), enter.into(), folder.join("cgroup.procs").into(), self.program.into()];
        self.program = "/bin/sh".into();
        self.args.splice(0..0, before);
        self
    }
}

/// A recipe with the process that runs it, if any.
#[derive(Debug)]
pub struct Component {
    recipe: ProcessSpec,
    log: PathBuf,
    child: Option<Child>,
    /// SIGTERM was sent: once, as a kubelet does. Our programs end at once at a second one.
    sigterm_sent: AtomicBool,
}

impl Component {
    /// Not started yet; the log is `<logs>/<name>.log`.
    pub fn new(recipe: ProcessSpec, logs: &Path) -> Self {
        let log = logs.join(format!("{}.log", recipe.name));
        Self { recipe, log, child: None, sigterm_sent: AtomicBool::new(false) }
    }

    pub fn name(&self) -> &str {
        &self.recipe.name
    }

    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Replaces what the next start runs.
    pub fn set_spec(&mut self, recipe: ProcessSpec) {
        self.recipe = recipe;
    }

    /// Starts the process; the log is appended to.
    pub fn start(&mut self) -> Result<()> {
        let name = &self.recipe.name;
        ensure!(self.child.is_none(), "{name} runs already");
        ensure!(
            gettid() == getpid(),
            "{name} must be started from the main thread: its death signal is tied to it"
        );
        let mut log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.log)
            .with_context(|| format!("cannot open {}", self.log.display()))?;
        writeln!(log, "{START} {} {:?}", self.recipe.program.display(), self.recipe.args)?;
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--"])
            .arg(&self.recipe.program)
            .args(&self.recipe.args)
            .envs(&self.recipe.env)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        self.child = Some(child);
        self.sigterm_sent.store(false, Ordering::Relaxed);
        Ok(())
    }

    pub fn kill(&mut self) -> Result<()> {
        self.signal(Signal::SIGKILL)?;
        if let Some(mut child) = self.child.take() {
            child.wait().with_context(|| format!("cannot reap {}", self.recipe.name))?;
        }
        Ok(())
    }

    /// SIGTERM, without waiting for the end.
    pub fn terminate(&self) -> Result<()> {
        if self.sigterm_sent.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        self.signal(Signal::SIGTERM)
    }

    /// SIGSTOP, as on a machine that is suspended or out of memory.
    pub fn pause(&self) -> Result<()> {
        self.signal(Signal::SIGSTOP)
    }

    /// SIGCONT: resumes after [`Component::pause`].
    pub fn resume(&self) -> Result<()> {
        self.signal(Signal::SIGCONT)
    }

    /// Waits for a process that is to end by itself, and forgets it. `None` while it runs.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        let Some(child) = &mut self.child else { return Ok(None) };
        let status = child.try_wait()?;
        if status.is_some() {
            self.child = None;
        }
        Ok(status)
    }

    /// SIGTERM, and SIGKILL after 5 s. Does nothing if it is not running.
    pub fn stop(&mut self) -> Result<Option<ExitStatus>> {
        if self.child.is_none() {
            return Ok(None);
        }
        self.terminate()?;
        let deadline = Instant::now() + GRACE;
        while let Some(child) = &mut self.child {
            if let Some(status) = child.try_wait()? {
                self.child = None;
                return Ok(Some(status));
            }
            if Instant::now() > deadline {
                self.kill()?;
                return Ok(Some(ExitStatus::from_raw(Signal::SIGKILL as i32)));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(None)
    }

    /// Fails, with the end of the log, if the process has ended by itself.
    pub fn check(&mut self) -> Result<()> {
        if let Some(child) = &mut self.child
            && let Some(status) = child.try_wait()?
        {
            self.child = None;
            bail!(
                "{} ended by itself ({status}); the end of {}:\n{}",
                self.name(),
                self.log.display(),
                self.log_tail(30)
            );
        }
        Ok(())
    }

    /// The last lines of the log.
    pub fn log_tail(&self, lines: usize) -> String {
        tail(&self.log, lines).unwrap_or_else(|error| format!("(no log: {error})"))
    }

    pub fn log(&self) -> &Path {
        &self.log
    }

    /// The first few lines of the log that contain a text, given in lower case, whatever their case.
    pub fn log_lines(&self, text: &str) -> Result<Vec<String>> {
        const FEW: usize = 10;
        let log = fs::read(&self.log).with_context(|| format!("cannot read {}", self.log.display()))?;
        let log = String::from_utf8_lossy(&log);
        Ok(log
            .lines()
            .filter(|line| line.to_ascii_lowercase().contains(text))
            .take(FEW)
            .map(str::to_owned)
            .collect())
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let Some(child) = &self.child else { return Ok(()) };
        let group = Pid::from_raw(i32::try_from(child.id()).context("process number out of range")?);
        match killpg(group, signal) {
            Ok(()) | Err(nix::errno::Errno::ESRCH) => Ok(()),
            Err(error) => Err(error).with_context(|| format!("cannot send {signal} to {}", self.recipe.name)),
        }
    }
}

impl Drop for Component {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            eprintln!("{}: {error:#}", self.name());
        }
    }
}

/// Whether a component's log contains a text since its last start.
pub fn has_logged(log: &Path, text: &str) -> Result<bool> {
    let lines = fs::read(log).with_context(|| format!("cannot read {}", log.display()))?;
    let lines = String::from_utf8_lossy(&lines);
    Ok(lines.rsplit(START).next().is_some_and(|since| since.contains(text)))
}

/// The last `lines` lines of a file, read from its last 64 KiB.
fn tail(path: &Path, lines: usize) -> Result<String> {
    const WINDOW: u64 = 64 << 10;
    let mut file = File::open(path)?;
    let size = file.metadata()?.len();
    file.seek(SeekFrom::Start(size.saturating_sub(WINDOW)))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<&str> = text.lines().collect();
    Ok(all[all.len().saturating_sub(lines)..].join("\n"))
}

/// Runs a helper program to its end and returns its standard output.
pub fn output(command: &mut Command) -> Result<String> {
    let shown = format!("{command:?}");
    let out = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {shown}"))?;
    ensure!(out.status.success(), "{shown}: {}\n{}", out.status, String::from_utf8_lossy(&out.stderr));
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Makes a folder empty, whatever was in it.
pub fn empty(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("cannot empty {}", folder.display()));
        }
        _ => {}
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))
}
