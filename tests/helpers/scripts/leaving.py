"""Starts a process that ignores SIGTERM, in the way that is asked for, says its id, and then fails, ends or goes on."""

import os
import signal
import subprocess
import sys
import time

how, end = sys.argv[1:]
program = """
import os, signal, sys, time
if "daemon" in sys.argv and os.fork():
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
time.sleep(600)
"""
child = subprocess.Popen(
    [sys.executable, "-S", "-c", program, how],
    env={} if how == "without environment" else None,
    start_new_session=how != "child",
    stdout=subprocess.PIPE,
    text=True,
)
pid = child.stdout.readline().strip()
if end == "exits at SIGTERM":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
print(f"left {pid}", flush=True)
if end == "fails":
    raise ValueError("told to fail")
if end != "ends":
    time.sleep(600)
