// Browsers start no worker for a page that is a file: its code, which searches, then runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.inside = new Promise(resolve => { frame.onload = resolve })
        .then(() => this.run(frame.contentWindow, url))
      document.body.append(frame)
    }

    async run(inside, url) {
      const load = url => new Promise((resolve, reject) => {
        const script = inside.document.createElement("script")
        Object.assign(script, {src: url, onload: resolve, onerror: reject})
        inside.document.body.append(script)
      })
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
      inside.importScripts = async (...urls) => { for (const url of urls) await load(url) }
      await load(url)
      return inside
    }

    async postMessage(data) {
      (await this.inside).dispatchEvent(new MessageEvent("message", {data}))
    }
  }
}
